"""A guard for each fragment against contributions whose size is far outside what is usual (ours, not the paper's).

One learner with a broken accelerator or a diverged optimizer sends finite numbers of absurd size: RDA averages norms,
so a single one would be taken over by everybody.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

WINDOW = 64
"""Norms that the running distribution remembers."""
ENOUGH = 16
"""Norms after which the guard begins to judge: before, nobody knows what is usual."""
NORMAL = 0.6745
"""Median absolute deviation of a standard normal: makes the score comparable to standard deviations."""
LEAST_SPREAD = 0.1
"""Spread of log norms below which differences are nothing: very even learners would refuse each other."""


class NormGuard:
    """The running distribution of log ‖d‖ of one fragment's contributions, by median and MAD.

    Scores are robust z-scores on the log scale and only large norms are refused: a small one (a learner that has just
    joined) does no harm. What holds the work of more steps than usual, as after a pause of the merges or behind a slow
    link, may be larger in proportion: ‖d‖ grows with the steps at most. Refused norms enter the window too, so that a
    change that everybody makes is usual after half a window, while fewer than half of the learners never move the
    median.
    """

    def __init__(self, threshold: float) -> None:
        """`threshold`: highest score that passes; 0 lets everything pass."""
        self._threshold = threshold
        self._norms: deque[float] = deque(maxlen=WINDOW)
        """log ‖d‖."""
        self._steps: deque[int] = deque(maxlen=WINDOW)

    def state(self) -> dict[str, Any]:
        """What it remembers, JSON-able: a restarted syncer knows what is usual at once."""
        return {"norms": list(self._norms), "steps": list(self._steps)}

    def take(self, state: dict[str, Sequence[Any]]) -> None:
        """Remember what `state` told, instead."""
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self._steps = deque(state["steps"], maxlen=WINDOW)

    @property
    def usual(self) -> float:
        """The median norm of those that it remembers; 0 before there is one."""
        return math.exp(statistics.median(self._norms)) if self._norms else 0.0

    def score(self, norm: float, steps: int) -> float:
        """Robust z-score of a norm of so many steps' work; 0 while too few were seen, or for a norm of 0."""
        if norm <= 0.0 or len(self._norms) < ENOUGH:
            return 0.0
        middle = statistics.median(self._norms)
        spread = statistics.median(abs(seen - middle) for seen in self._norms)
        longer = math.log(max(1.0, steps / statistics.median(self._steps)))
        return NORMAL * (math.log(norm) - longer - middle) / max(spread, LEAST_SPREAD)

    def admits(self, norm: float, steps: int) -> bool:
        """Whether a contribution of this norm, from that many steps, may be merged. Remembers it either way."""
        passed = self._threshold == 0.0 or self.score(norm, steps) <= self._threshold
        if norm > 0.0:
            self._norms.append(math.log(norm))
            self._steps.append(max(1, steps))
        return passed
