"""Stepped mode: the same protocol with all learners in one process, driven by events in virtual time.

Used to test the algorithm as a whole and to search for settings: quality depends on the order of events, not on the
clock. Learners of one pace and no delay step together, talk, and merge before anybody goes on. τ = 0 leaves no grace
window, so a merge of all learners then takes K = M. Deterministic: no clock, no thread, no network.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from functools import partial

from app.diloco.agenda import Agenda, Kill, Phase
from app.diloco.events import (
    AT_BUDGET,
    Arrived,
    Decision,
    Event,
    Finish,
    Grant,
    Join,
    Lost,
    Merge,
    Note,
    Published,
    Record,
    Recorded,
    Reported,
    Tick,
    Wake,
)
from app.diloco.job import MergeJob
from app.diloco.messages import Hello, Report, Welcome
from app.diloco.process import Letter, Process, SteppedLearner
from app.diloco.protocol import Protocol
from app.diloco.replica import Replica


class SteppedFleet:
    """Drives `protocol` and the learners that join it."""

    def __init__(
        self,
        protocol: Protocol,
        learners: Sequence[SteppedLearner],
        *,
        merge_s: float = 0.0,
        kills: Iterable[Kill] = (),
        adopt_on_arrival: bool = False,
        chance: random.Random | None = None,
    ):
        """All learners join at once, at time 0.

        Args:
            protocol: the syncer's state machine.
            learners: in the order in which they do what they do at the same moment.
            merge_s: virtual seconds from the end of a round until its version is published.
            kills: in the order of their time; one of a learner that is away is left out.
            adopt_on_arrival: adopt at the first step boundary after an offer's arrival, as the actors do. Without
                it, τ own steps after the capture where it has arrived by then: the longest that τ allows.
            chance: draws the jitter of messages.
        """
        self.protocol = protocol
        self.notes: list[Note] = []
        self.processes: dict[str, Process] = {}
        self._learners = {learner.name: learner for learner in learners}
        self._merge_s = merge_s
        self._kills = iter(kills)
        self._adopt_on_arrival = adopt_on_arrival
        self._chance = chance or random.Random(0)
        self._agenda = Agenda()
        self._parked: dict[str, Report] = {}
        """Polls that wait for news."""
        self._welcomes: dict[str, Welcome] = {}
        for name in self._learners:
            self._start(name)
        self._plan_kill()
        self._agenda.run()

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._agenda.now

    @property
    def replicas(self) -> dict[str, Replica]:
        """The replicas of the living processes."""
        return {name: process.replica for name, process in self.processes.items()}

    def advance(self) -> None:
        """Go on to the next moment at which anything happens, and through all that happens then.

        For learners in lockstep without delays that is one inner step of each. Raises RuntimeError when nothing will
        ever happen again.
        """
        at = min(self._agenda.next_at, self.protocol.next_wake)
        if math.isinf(at):
            raise RuntimeError("nobody is left to do anything")
        self._agenda.now = max(self._agenda.now, at)
        self._agenda.run()
        if self.protocol.next_wake <= self.now:
            self._feed(Tick())
            self._agenda.run()

    def finish(self) -> None:
        """The last round of all fragments; steps under way still count."""
        self._feed(Finish(AT_BUDGET, self.protocol.settings.final_deadline_s))
        while not self.protocol.ended:
            self.advance()

    # ---- life and death

    def join(self, learner: SteppedLearner) -> None:
        """One more joins now."""
        self._learners[learner.name] = learner
        self._start(learner.name)

    def send_away(self, name: str) -> None:
        """This one hands in and leaves."""
        if (process := self.processes.get(name)) is not None:
            process.leave()

    def _start(self, name: str) -> None:
        """A process of this learner joins and trains; none does once the run is ending."""
        protocol, learner = self.protocol, self._learners[name]
        if protocol.finishing is not None:
            return
        token = f"{name}-{protocol.incarnations.get(name, 0) + 1}"
        self._feed(Join(Hello(protocol.run_id, name, protocol.layout.hash, "stepped", token)))
        body = learner.start()
        replica = Replica(protocol.layout, protocol.settings, body.parameters, self._welcomes.pop(token))
        self.processes[name] = Process(
            learner=learner,
            body=body,
            replica=replica,
            settings=protocol.settings,
            agenda=self._agenda,
            chance=self._chance,
            post=self._take,
            tokens=lambda: protocol.books.tokens,
            adopt_on_arrival=self._adopt_on_arrival,
            left=partial(self._left, name),
        )

    def _left(self, name: str) -> None:
        del self.processes[name]

    def _plan_kill(self) -> None:
        kill = next(self._kills, None)
        if kill is not None:
            self._agenda.add(kill.at_s, Phase.MESSAGE, partial(self._kill, kill))

    def _kill(self, kill: Kill) -> None:
        process = self.processes.pop(kill.learner, None)
        if process is not None:
            process.die()
            self._parked.pop(kill.learner, None)
            lost = Lost(kill.learner, process.replica.sender.incarnation, "exit")
            self._agenda.add(self.now + kill.notice_s, Phase.MESSAGE, partial(self._feed, lost))
            self._agenda.add(self.now + kill.away_s, Phase.MESSAGE, partial(self._start, kill.learner))
        self._plan_kill()

    # ---- the syncer

    def _take(self, process: Process, letter: Letter) -> None:
        for given in letter.given:
            self._feed(Arrived.of(given, self.protocol.layout, self.protocol.settings))
        self._feed(Reported(letter.report))
        if letter.poll and not process.dead:
            self._parked[process.name] = letter.report
            self._answer(process.name)

    def _answer(self, name: str) -> None:
        """Answer this learner's poll, if there is news for it."""
        report = self._parked.get(name)
        if report is None:
            return
        reply, urgent = self.protocol.reply(report, self.now)
        if urgent:
            del self._parked[name]
            process = self.processes[name]
            process.down.send(partial(process.hear, reply))

    def _publish(self, job: MergeJob) -> None:
        self._feed(Published(job.run()))

    def _feed(self, event: Event) -> None:
        for decision in self.protocol.step(event, self.now):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Merge(job):
                self._agenda.add(self.now + self._merge_s, Phase.MESSAGE, partial(self._publish, job))
            case Record(ticket):
                self._feed(Recorded(ticket))
            case Grant(token, welcome):
                self._welcomes[token] = welcome
            case Wake(learners):
                for name in learners:
                    self._answer(name)
            case Note():
                self.notes.append(decision)
            case _:
                pass  # nobody is refused here, and the end shows in the protocol
