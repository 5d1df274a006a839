"""The learners as the syncer sees them: who is live, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.diloco.clock import Estimate, fleet_stretch, hang_deadline
from app.diloco.messages import Report
from app.diloco.pace import Pace
from app.diloco.settings import DilocoSettings


@dataclass
class Member:
    """One joined incarnation. Times are seconds of the protocol's clock."""

    learner: str
    incarnation: int
    pool: str
    token: str
    last_heard: float
    clock: int
    pace: Pace
    report: Report | None = None
    usual: Estimate = field(default_factory=lambda: Estimate(window=256))
    """Its usual step time."""
    last_merged_at: float | None = None
    announced_first_merge: bool = False
    garbage: int = 0
    """Messages in a row that no working learner can have sent."""
    full_pulls: dict[int, int] = field(default_factory=dict)
    """Fragment → full values given to it in a row because it could not read what it had got."""

    handed_in: dict[int, set[int]] = field(default_factory=dict)
    """Fragment → its rounds that waited for what it has, all of it, before it leaves."""

    @property
    def step_time(self) -> float:
        """Its recent median step time, 0 before the first report."""
        return self.report.step_time if self.report else 0.0

    def hear(self, report: Report, t: int, now: float) -> None:
        """Take a report that is newer than the one before; t is the global clock."""
        self.last_heard, self.report = now, report
        self.clock = max(self.clock, report.clock)
        self.pace.hear(report, t)
        self.full_pulls = {p: pulls for p, pulls in self.full_pulls.items() if p in report.need_full}
        if report.step_time > 0:
            self.usual.add(report.step_time)


class Members(dict[str, Member]):
    """Joined learners by id."""

    def live(self, now: float, settings: DilocoSettings) -> list[Member]:
        """Joined, not fenced and within their hang deadline, in learner-id order (`docs/protocol.md`, live)."""
        stretch = fleet_stretch(
            [member.step_time for member in self.values()], [member.usual.value for member in self.values()]
        )
        return [
            self[learner]
            for learner in sorted(self)
            if now - self[learner].last_heard
            <= hang_deadline(self[learner].usual.value, settings.hang_min_s, settings.hang_steps, stretch)
        ]
