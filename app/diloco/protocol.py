"""The syncer's rules as one pure state machine: `step(event, now)` changes the state and returns decisions.

The syncer actor, the stepped mode and a replay feed the same machine and carry out what it decides. It never waits,
never reads a clock and never touches the network. (`docs/protocol.md`; Decoupled DiLoCo, arXiv 2604.21428)
"""

from __future__ import annotations

import math

from app.diloco import cut, ending, handing_in, intake, joining, merging
from app.diloco.events import (
    AT_BUDGET,
    Arrived,
    Decision,
    Event,
    Finish,
    Join,
    Lost,
    Mark,
    Published,
    PublishFailed,
    Recorded,
    RecordFailed,
    Reported,
    Tick,
)
from app.diloco.machine import Machine
from app.diloco.messages import Reply, Report
from app.diloco.replying import reply_to


class Protocol(Machine):
    """The state machine: its memory is `Machine`, its rules are in the files named here."""

    def step(self, event: Event, now: float) -> list[Decision]:
        """Take one event at time `now` (seconds, monotonic) and say what is to be done."""
        if not self.started:
            self.started = True
            joining.remember(self, now)
        self._take(event, now)
        self._progress(now)
        decisions, self.out = self.out, []
        return decisions

    def reply(self, report: Report, now: float) -> tuple[Reply, bool]:
        """What this learner should know now, and whether it is worth answering a parked poll for."""
        return reply_to(self, report, now)

    @property
    def next_wake(self) -> float:
        """When the machine wants a `Tick` although nothing happens."""
        if self.ended:
            return math.inf
        cut_by = math.inf if self.cut is None else self.cut.deadline
        return min([self.look_at, cut_by, *(round_.wake_at for round_ in self.rounds.values())])

    def _take(self, event: Event, now: float) -> None:
        match event:
            case Join(hello):
                joining.join(self, hello)
            case Recorded(ticket):
                joining.admit(self, ticket, now)
            case RecordFailed(ticket):
                joining.deny(self, ticket)
            case Lost(learner, incarnation, reason):
                joining.leave(self, learner, incarnation, reason)
            case Reported(report):
                intake.reported(self, report, now)
            case Arrived():
                intake.arrived(self, event, now)
            case Published(result):
                merging.published(self, result, now)
            case PublishFailed(job, error):
                merging.publish_failed(self, job, error, now)
            case Finish():
                ending.finish(self, event, now)
            case Mark(number, deadline_s):
                cut.mark(self, number, deadline_s, now)
            case Tick():
                pass

    def _progress(self, now: float) -> None:
        """What follows from the state: the clock, closing rounds, due fragments, the budget, the end."""
        cut.give_up_late(self, now)
        if self.ended:
            return
        if self.finishing is None and self.books.tokens >= self.budget:
            ending.finish(self, Finish(AT_BUDGET, self.settings.final_deadline_s), now)
        if self.finishing is None:
            merging.open_due(self, now)
            handing_in.hand_in(self, now)
        else:
            ending.open_final(self, now)
        merging.close_due(self, now)
        ending.end_if_over(self, now)
