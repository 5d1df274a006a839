"""A guard for each fragment against contributions whose size is far outside what is usual (ours, not the paper's).

One learner with a broken accelerator or a diverged optimizer sends finite numbers of absurd size: RDA averages norms,
so a single one would be taken over by everybody.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.diloco.settings import DilocoSettings

NORMAL = 0.6745
"""Median absolute deviation of a standard normal: makes the score comparable to standard deviations."""
NOTHING_SEEN: dict[str, Any] = {"round": 0, "seen": []}
"""State of a guard that has seen nothing."""

RoundKey = tuple[int, int]
"""(epoch, round id): rises from round to round."""


@dataclass(frozen=True)
class Seen:
    """One norm that the guard remembers."""

    round: int
    """The guard's own count of rounds, which goes on when the syncer restarts."""
    learner: str
    log_norm: float
    steps: int


class NormGuard:
    """The running distribution of log(‖d‖ / steps) of one fragment's contributions, by median and MAD.

    Scores are robust z-scores on the log scale and only large norms are refused: a small one (a learner that has just
    joined) does no harm. What holds the work of more steps than usual, as after a pause of the merges or behind a slow
    link, may be larger in proportion: ‖d‖ grows with the steps at most. The work of fewer steps may be as large as that
    of the usual number.

    It remembers the norms of `guard_rounds` rounds and refuses nothing before it knows `guard_after` of them: those of
    the first rounds grow a hundredfold while the learning rate warms up, and a round of sixteen learners has sixteen of
    the same moment. Every norm enters, also of what was refused or came too late, and each learner has one vote, its
    own median, however often it gets an answer in. So a change that more than half of the learners make is usual after
    half of the rounds remembered, and half of them or fewer never move what is usual: of an even number the smaller
    middle vote counts. Of two learners nobody can tell which one is broken: the one with the smaller norms counts as
    healthy, as small norms do no harm. One learner alone is compared with its own past.
    """

    def __init__(self, settings: DilocoSettings) -> None:
        """`settings`: `guard_z` is the highest score that passes, 0 lets everything pass."""
        self._settings = settings
        self._seen: list[Seen] = []
        self._round = 0
        self._newest: RoundKey | None = None

    def state(self) -> dict[str, Any]:
        """What it remembers, JSON-able: a restarted syncer knows what is usual at once."""
        seen = [[one.round, one.learner, one.log_norm, one.steps] for one in self._seen]
        return {"round": self._round, "seen": seen}

    def take(self, state: dict[str, Any]) -> None:
        """Remember what `state` told, instead."""
        self._round, self._seen = state["round"], [Seen(*one) for one in state["seen"]]

    @property
    def usual(self) -> float:
        """The norm of as many steps as usual at the usual norm per step; 0 before there is one."""
        return math.exp(self._middle(_rate)) * self._middle(_steps) if self._seen else 0.0

    def score(self, norm: float, steps: int) -> float:
        """Robust z-score of a norm of so many steps' work; 0 while too few were seen, or for a norm of 0."""
        if norm <= 0.0 or not self._knows_enough():
            return 0.0
        middle = self._middle(_rate)
        spread = self._middle(lambda one: abs(_rate(one) - middle))
        rate = math.log(norm / max(steps, self._middle(_steps)))
        return NORMAL * (rate - middle) / max(spread, self._settings.guard_spread)

    def admits(self, learner: str, key: RoundKey, norm: float, steps: int) -> bool:
        """Whether this learner's contribution to that round may be merged. Remembers its norm either way."""
        self._enter(key)
        passed = self._settings.guard_z == 0.0 or self.score(norm, steps) <= self._settings.guard_z
        self.remember(learner, norm, steps)
        return passed

    def remember(self, learner: str, norm: float, steps: int) -> None:
        """A norm that needs no judgement, as its contribution came too late. It counts to the newest round."""
        if norm > 0.0:
            self._seen.append(Seen(self._round, learner, math.log(norm), max(1, steps)))

    def _enter(self, key: RoundKey) -> None:
        """Count this round if it is a new one, and forget what is too long ago."""
        if self._newest is None or key > self._newest:
            self._newest = key
            self._round += 1
            self._seen = [one for one in self._seen if one.round >= self._round - self._settings.guard_rounds]

    def _knows_enough(self) -> bool:
        return len({one.round for one in self._seen if one.round < self._round}) >= self._settings.guard_after

    def _middle(self, figure: Callable[[Seen], float]) -> float:
        """The median over the learners of each one's median."""
        votes: dict[str, list[float]] = {}
        for one in self._seen:
            votes.setdefault(one.learner, []).append(figure(one))
        return statistics.median_low([statistics.median(figures) for figures in votes.values()])


def _rate(one: Seen) -> float:
    return one.log_norm - math.log(one.steps)


def _steps(one: Seen) -> float:
    return one.steps
