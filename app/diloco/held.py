"""One fragment as a learner has it: the base, the counters since, and the fate of every token.

Captures on one base are prefixes of the same work, so at most one of them is ever merged: a version that holds one
makes the syncer refuse the others (`already_merged`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from app.diloco.feedback import Feedback
from app.diloco.messages import Ask, Offer


@dataclass
class Capture:
    """What was sent for a round: its place in the protocol, its counters, and what adopting it will need."""

    epoch: int
    round: int
    version: int
    """The version the round started from."""
    c_steps: int
    c_tokens: int
    delta: torch.Tensor | None = None
    """The decoded d, fp32 [numel]; for rebase only."""
    residue: torch.Tensor | None = None
    """ε, what the codec left out, fp32 [numel]; for error feedback only."""


@dataclass
class Held:
    """One fragment of a learner. Θ̂ of the base is fp32 [numel]."""

    version: int
    base: torch.Tensor
    clock: int = 0
    """Global clock t at which `version` was made."""
    c_steps: int = 0
    c_tokens: int = 0
    captures: list[Capture] = field(default_factory=list)
    """Oldest first, of work that the counters still hold; their fate is not known yet."""
    in_flight: list[list[Capture]] = field(default_factory=list)
    """The same for work on older bases, a list for each base: the counters hold it no more, it is outstanding."""
    discarded: dict[str, int] = field(default_factory=dict)
    feedback: Feedback | None = None

    @property
    def outstanding(self) -> int:
        """Tokens without a fate."""
        return self.c_tokens + sum(captures[-1].c_tokens for captures in self.in_flight)

    def step(self, tokens: int) -> None:
        """One inner step."""
        self.c_steps += 1
        self.c_tokens += tokens

    def capture(self, ask: Ask) -> Capture:
        """Note what is being sent. An earlier round from the same version was given up: it merges nothing."""
        self.captures = [capture for capture in self.captures if capture.version < ask.version]
        self.captures.append(Capture(ask.epoch, ask.round, ask.version, self.c_steps, self.c_tokens))
        return self.captures[-1]

    def rebase(self, offer: Offer) -> Capture | None:
        """Adopt by rebase: all but the capture that the offer contains, which is returned, stays outstanding."""
        self._land(offer)  # of a restart before
        contained, self.captures = _decide(self.captures, offer)
        if contained is not None:
            self.c_steps -= contained.c_steps
            self.c_tokens -= contained.c_tokens
        return contained

    def restart(self, offer: Offer, share: float) -> None:
        """Adopt by overwrite (share 0) or mix (share α): progress outside the capture stays to that share only.

        A capture whose fate is open flies on; the versions to come decide it.
        """
        self._land(offer)
        contained, undecided = _decide(self.captures, offer)
        self._carry(contained)
        accounted = contained or (undecided[-1] if undecided else None)
        if contained is None and undecided:
            self.in_flight.append(undecided)
        rest_tokens = self.c_tokens - (accounted.c_tokens if accounted else 0)
        rest_steps = self.c_steps - (accounted.c_steps if accounted else 0)
        kept = math.floor(share * rest_tokens)
        self._discard("overwritten" if accounted else "missed", rest_tokens - kept)
        self.c_tokens, self.c_steps = kept, math.ceil(share * rest_steps) if kept else 0
        self.captures = []

    def _land(self, offer: Offer) -> None:
        """Give what was in flight its fate, where this offer decides it."""
        still = []
        for captures in self.in_flight:
            contained, undecided = _decide(captures, offer)
            self._carry(contained)
            if contained is not None:
                self._discard("overwritten", captures[-1].c_tokens - contained.c_tokens)
            elif undecided:
                still.append(undecided)
            else:
                self._discard("missed", captures[-1].c_tokens)
        self.in_flight = still

    def _carry(self, contained: Capture | None) -> None:
        """A version contains this capture: what its encoding left out is carried into the next one."""
        if self.feedback is not None and contained is not None and contained.residue is not None:
            self.feedback.contained(contained.residue)

    def _discard(self, reason: str, tokens: int) -> None:
        if tokens:
            self.discarded[reason] = self.discarded.get(reason, 0) + tokens


def _decide(captures: Sequence[Capture], offer: Offer) -> tuple[Capture | None, list[Capture]]:
    """The capture that the offer contains, and those that a later version may still contain.

    The round of a capture makes the version after `capture.version`, in its own epoch, or none. Once a capture is
    contained, later ones of the same work are refused; under rebase they are kept until that is certain.
    """
    rounds = {(entry.epoch, entry.round) for entry in offer.contains}
    contained, undecided = None, []
    for capture in captures:
        if (capture.epoch, capture.round) in rounds:
            contained = capture
        elif capture.version >= offer.version and capture.epoch >= offer.epoch:
            undecided.append(capture)
    return contained, undecided
