"""What is fed to the protocol (events) and what it wants done (decisions). All are plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from app.diloco.codec import get_codec
from app.diloco.fragments import Layout
from app.diloco.job import MergeJob, MergeResult, decode_contribution
from app.diloco.merge import norm
from app.diloco.messages import NO_PAYLOAD, Contribution, CutId, Hello, Report, Welcome
from app.diloco.settings import DilocoSettings
from app.diloco.whole import is_contribution

# ---- events


@dataclass(frozen=True)
class Join:
    """A learner process asks to join."""

    hello: Hello


@dataclass(frozen=True)
class Recorded:
    """A `Record` decision is durable."""

    ticket: str


@dataclass(frozen=True)
class RecordFailed:
    """A `Record` decision could not be made durable."""

    ticket: str


@dataclass(frozen=True)
class Reported:
    """A learner's counters arrived."""

    report: Report


@dataclass(frozen=True)
class Arrived:
    """A contribution arrived; `delta` is its decoded d, fp32 [numel], or None when it was garbage."""

    contribution: Contribution
    delta: torch.Tensor | None
    norm: float = 0.0
    """‖d‖"""

    @classmethod
    def of(cls, contribution: Contribution, layout: Layout, settings: DilocoSettings) -> Arrived:
        """The event for what came as a contribution: its d decoded and measured, or nothing where it is garbage.

        The event does not hold the payload: that is memory which another process shares, and a round may keep its
        answers for long.
        """
        if not is_contribution(contribution, len(layout.fragments)):
            return cls(contribution, None)
        codec = get_codec(settings.codec_up, settings.codec_block)
        delta = decode_contribution(contribution, layout.fragments[contribution.fragment].numel, codec)
        return cls(replace(contribution, payload=NO_PAYLOAD), delta, 0.0 if delta is None else norm(delta))


@dataclass(frozen=True)
class Lost:
    """Somebody who watches learners says that this incarnation is gone, or must be treated so."""

    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True)
class Published:
    """A merge is computed and durable: it may be offered."""

    result: MergeResult


@dataclass(frozen=True)
class PublishFailed:
    """A merge could not be made durable; it is tried again."""

    job: MergeJob
    error: str


AT_BUDGET = "budget"
"""The reason of a run's end that is no stop."""


@dataclass(frozen=True)
class Finish:
    """End the run: one last round of all fragments within `deadline_s` seconds."""

    reason: str
    deadline_s: float


@dataclass(frozen=True)
class Mark:
    """Make a consistent cut, which every member has saved within `deadline_s` seconds."""

    number: int
    deadline_s: float


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = Join | Recorded | RecordFailed | Reported | Arrived | Lost | Published | PublishFailed | Finish | Mark | Tick

# ---- decisions


@dataclass(frozen=True)
class Record:
    """Make `meta` durable, then feed `Recorded` (or `RecordFailed`) with the ticket."""

    ticket: str
    meta: dict[str, Any]


@dataclass(frozen=True)
class Grant:
    """Answer the hello with this token."""

    token: str
    welcome: Welcome


@dataclass(frozen=True)
class Deny:
    """Refuse the hello with this token."""

    token: str
    why: str
    again: bool = False
    """Nothing is wrong with the hello: the same one may be sent again later."""


@dataclass(frozen=True)
class Merge:
    """Run the job, make its result durable, then feed `Published` (or `PublishFailed`)."""

    job: MergeJob


@dataclass(frozen=True)
class Wake:
    """There is something new for these learners: answer their polls."""

    learners: tuple[str, ...]


@dataclass(frozen=True)
class Note:
    """One line for the event tape."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The last round is published: nothing will change any more."""

    reason: str


@dataclass(frozen=True)
class CutBegun:
    """The state of this very moment is the syncer's part of the cut: copy it."""

    id: CutId


@dataclass(frozen=True)
class CutDone:
    """These learners (and their incarnations) have saved their part: the cut is whole."""

    id: CutId
    learners: dict[str, int]


@dataclass(frozen=True)
class CutGivenUp:
    """These learners have not saved their part in time; or there was nobody to save one."""

    id: CutId
    missing: tuple[str, ...]


Decision = Record | Grant | Deny | Merge | Wake | Note | Ended | CutBegun | CutDone | CutGivenUp
