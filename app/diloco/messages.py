"""What learners and syncer say to each other: plain values, safe to deliver twice.

Every message names run, syncer epoch, learner, incarnation; those about a fragment also its base version and round.
Tensors travel as one contiguous uint8 array (`payload`) with everything else beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

Payload = npt.NDArray[np.uint8]
CutId = tuple[int, int]
"""The epoch that made a consistent cut, and its number."""
NO_PAYLOAD: Payload = np.empty(0, np.uint8)
"""Stands where a payload was that has been decoded."""


UNKNOWN = "?"
"""Stands where a learner's name was that can't be read."""


class Refusal(Enum):
    """Why a contribution or a message was not taken. Each is counted and harms nothing."""

    FOREIGN = "foreign"  # another run's message
    EPOCH = "epoch"  # addressed to a syncer of another epoch
    INCARNATION = "incarnation"  # an older incarnation of this learner, or one that never joined
    LATE = "late"  # its round is closed, or its base is old and the rule is to discard
    STALE_BASE = "stale_base"  # its base version left the ring
    ALREADY_MERGED = "already_merged"  # a merge since its base holds this incarnation's work
    CORRUPT = "corrupt"  # wrong size, wrong digest, NaN or Inf
    OUTLIER = "outlier"  # its norm is far outside what is usual for its fragment
    DUPLICATE = "duplicate"  # this very message was taken before


@dataclass(frozen=True)
class Sender:
    """Who speaks: fenced by run id, syncer epoch and incarnation."""

    run_id: str
    epoch: int
    learner: str
    incarnation: int


@dataclass(frozen=True)
class Report:
    """A learner's counters, cumulative within its incarnation, so that any one may be lost or come twice.

    `discarded[p]` maps a reason to the tokens of fragment p that adoptions discarded so far; `outstanding[p]` is
    c_tokens of fragment p. For each p, tokens = merged + discarded + outstanding once all offers were adopted.
    """

    sender: Sender
    seq: int
    """Rises by one with every report, so that an older one that arrives later is recognised."""
    heard: int
    """Newest round id heard in the sender's epoch: asks up to it are not repeated."""
    clock: int
    steps: int
    tokens: int
    step_time: float
    """Median seconds of the learner's recent inner steps."""
    loss: float
    held: tuple[int, ...]
    """Newest version received of each fragment, adopted or waiting for the next step boundary."""
    discarded: tuple[dict[str, int], ...]
    outstanding: tuple[int, ...]
    idle: bool = False
    """The learner was told to finish and has stopped stepping."""
    leaving: bool = False
    """It has stopped stepping, and goes when it has handed in what it has."""
    need_full: tuple[int, ...] = ()
    """Fragments whose digest did not match: the next offer of each must be a full fragment."""
    samples: int = 0
    """Samples that its steps took, those of steps that wrote nothing included."""
    cut_taken: CutId | None = None
    """The newest cut that it has copied its state for."""
    cut_saved: CutId | None = None
    """The newest cut whose copy is durable."""


@dataclass(frozen=True)
class Ask:
    """The syncer asks for fragment `fragment`; a new ask for a fragment supersedes an older one."""

    fragment: int
    round: int
    epoch: int
    version: int
    """The version n that the round starts from: a merge of it is version n+1."""


@dataclass(frozen=True)
class Contribution:
    """A learner's answer to an ask: d = encode(θ − Θ̂_base) and the counters since it adopted that base."""

    sender: Sender
    fragment: int
    round: int
    base_version: int
    c_steps: int
    c_tokens: int
    codec: str
    payload: Payload
    digest: str
    """Of the payload: what a network or a memory garbles is still a number, and would be merged."""
    report: Report
    """The counters at the moment of capture."""


@dataclass(frozen=True)
class Contained:
    """One contribution that a version holds, with its weight and its counters at capture."""

    learner: str
    incarnation: int
    epoch: int
    round: int
    base: int
    """The version that the work started from."""
    version: int
    """The version that holds it."""
    c_steps: int
    c_tokens: int
    weight: float
    samples: int = 0
    """Samples that the learner's steps had taken at capture: work on them is in this version or in an earlier one, or
    an adoption discarded it."""


@dataclass(frozen=True)
class Consumed:
    """What became of the samples of one incarnation, counted in the order in which it takes them."""

    learner: str
    incarnation: int
    used: int
    """Samples that a durable version holds work on: the first ones."""
    taken: int
    """Samples that its steps took, as far as it told."""
    ended: bool
    """It gives nothing more: what comes after the used ones is for others."""


@dataclass(frozen=True)
class Offer:
    """A newer value of one fragment for one learner.

    `codec` is the codec of `payload`; with `base_version` None it is a full fragment Θ̂ in fp32, else a list of encoded
    changes, one for each version after `base_version`, one behind the other.
    """

    fragment: int
    version: int
    epoch: int
    clock: int
    """Global clock t when the version was made."""
    base_version: int | None
    codec: str
    payload: Payload
    digest: str
    """Of Θ̂ at `version`."""
    contains: tuple[Contained, ...]
    """What the versions newer than the one held contain of the recipient's own work."""
    restart: bool = False
    """The recipient's work was refused as an outlier: nothing of it may stay, whatever `adopt` says."""


@dataclass(frozen=True)
class Hello:
    """A learner process wants to join."""

    run_id: str
    learner: str
    layout_hash: str
    pool: str
    token: str
    """Unique per process: the same hello delivered twice gives one incarnation."""
    timeline: dict[str, float] = field(default_factory=dict)
    """Unix times of the process' start-up phases."""
    cpu_s: float = 0.0
    """CPU seconds that the process has used by now."""


@dataclass(frozen=True)
class Welcome:
    """The answer to a hello: an incarnation, the clock and the newest version of every fragment."""

    sender: Sender
    clock: int
    offers: tuple[Offer, ...]
    tokens_processed: int
    finish: bool = False
    seq: int = -1
    """Newest report of this incarnation that the syncer knows of."""
    donors: tuple[str, ...] = ()
    """Learners that are at work, those with the most steps first: whoever lacks something may ask them."""


@dataclass(frozen=True)
class Reply:
    """The answer to a poll: whatever this learner should know now."""

    epoch: int
    clock: int
    tokens_processed: int
    """Global processed tokens, for learning rate and budget."""
    live: int
    asks: tuple[Ask, ...] = ()
    offers: tuple[Offer, ...] = ()
    finish: bool = False
    """The budget is reached: stop stepping, answer the last round."""
    fenced: bool = False
    """This incarnation is refused from now on: leave."""
    cut: CutId | None = None
    """Copy your state for this cut before you receive anything of this reply."""
