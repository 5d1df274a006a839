"""What an incarnation can have done by now: counters that no process reaches in the time are garbage.

This stops what a broken process sends, not one that lies with care: nobody can tell that from a faster machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.diloco.messages import Report

LEAST_STEP_S = 0.00025
"""No inner step is shorter: Python and an optimizer take several times as long for the smallest model."""
MOST_STEP_S = 86_400.0
"""No inner step is longer, in seconds."""
FREE_STEPS = 16
"""Steps that are taken on trust: before a process has told how long its own take."""
SPEED_UP = 10.0
"""How much faster than its fastest report says a learner may have been over its whole life."""
LONGEST_OUTAGE_S = 30 * 86_400.0
"""For how long a learner may have stepped alone before a restarted syncer hears of it."""


@dataclass
class Pace:
    """A learner's counters at some moment, and how far and how fast it has come since.

    The time runs from a moment before the first of the steps that it bounds, not from the last report: messages may
    be late, and come all at once.
    """

    began_at: float
    """Seconds of the protocol's clock."""
    steps: int
    """Its steps at that moment."""
    clock: int
    """Its newest clock."""
    ahead: int = 0
    """By how much it raised its own clock beyond what an offer may have lifted it to, over all reports since."""
    fastest: float = math.inf
    """Shortest step time that was reported, in seconds."""
    remembered_at: float | None = None
    """Start of a syncer that knows this learner from its journal, until it has heard from it."""

    @classmethod
    def joined(cls, now: float, clock: int) -> Pace:
        """Of an incarnation that is admitted now."""
        return cls(now, 0, clock)

    @classmethod
    def remembered(cls, now: float, steps: int, clock: int) -> Pace:
        """Of one that the journal knows: it may have stepped on for long."""
        return cls(now - LONGEST_OUTAGE_S, steps, clock, remembered_at=now)

    def allows(self, report: Report, t: int, now: float) -> bool:
        """Whether steps and clock can be what the report says."""
        if report.step_time > MOST_STEP_S:
            return False
        fastest = min(self.fastest, report.step_time) if report.step_time > 0 else self.fastest
        a_step = LEAST_STEP_S if math.isinf(fastest) else max(LEAST_STEP_S, fastest / SPEED_UP)
        most = FREE_STEPS + (now - self.began_at) / a_step
        return report.steps - self.steps <= most and self.ahead + self._raised(report, t) <= most

    def hear(self, report: Report, t: int) -> None:
        """Take a report that was allowed."""
        if report.step_time > 0:
            self.fastest = min(self.fastest, report.step_time)
        self.ahead += self._raised(report, t)
        self.clock = max(self.clock, report.clock)
        if self.remembered_at is not None:
            self.began_at, self.steps, self.ahead = self.remembered_at, report.steps, 0
            self.remembered_at = None

    def _raised(self, report: Report, t: int) -> int:
        """Steps by which its clock rose on its own: offers lift it to t at most."""
        return max(0, report.clock - max(self.clock, t))
