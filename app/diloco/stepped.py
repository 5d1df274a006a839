"""Stepped mode: the same protocol with all learners in one process, stepped in turn in virtual time.

One tick is one inner step of every learner. Used to test the algorithm as a whole and to search for settings. τ = 0
exists only here; it leaves no grace window, so a merge of all learners then takes K = M. Deterministic: no clock, no
thread, no network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from app.diloco.events import (
    Arrived,
    Decision,
    Event,
    Finish,
    Grant,
    Join,
    Merge,
    Note,
    Published,
    Record,
    Recorded,
    Reported,
)
from app.diloco.messages import Hello, Reply, Welcome
from app.diloco.protocol import Protocol
from app.diloco.replica import Replica

STEP_TIME = 1.0  # virtual seconds of one inner step

InnerStep = Callable[[Replica, int], float]
"""Takes one inner step inside `replica.writing(tokens)`, given the global token count; returns the loss."""


@dataclass
class SteppedLearner:
    """One learner: its parameters by name, and its inner step."""

    name: str
    parameters: Mapping[str, torch.Tensor]
    inner_step: InnerStep
    loss: float = float("nan")
    adopt_at: dict[int, int] = field(default_factory=dict)
    """Fragment → tick at whose end the offer in the inbox is adopted: τ ticks after it was captured."""


class SteppedFleet:
    """Drives `protocol` and the learners that joined it."""

    def __init__(self, protocol: Protocol, learners: Sequence[SteppedLearner]):
        self.protocol = protocol
        self.ticks = 0
        self.notes: list[Note] = []
        self._welcomes: dict[str, Welcome] = {}
        self._learners = {learner.name: learner for learner in learners}
        self.replicas: dict[str, Replica] = {}
        for learner in learners:
            self._join(learner)

    def _join(self, learner: SteppedLearner) -> None:
        protocol = self.protocol
        self._feed(Join(Hello(protocol.run_id, learner.name, protocol.layout.hash, "stepped", learner.name)))
        welcome = self._welcomes[learner.name]
        self.replicas[learner.name] = Replica(protocol.layout, protocol.settings, learner.parameters, welcome)

    def tick(self) -> None:
        """Every learner takes one inner step, then they talk to the syncer."""
        self.ticks += 1
        for name, replica in self.replicas.items():
            learner = self._learners[name]
            learner.loss = learner.inner_step(replica, self.protocol.books.tokens)
        self._talk(idle=False)

    def finish(self) -> None:
        """The last round of all fragments, with everybody idle."""
        self._feed(Finish("budget", self.protocol.settings.final_deadline_s))
        while not self.protocol.ended:
            self.ticks += 1
            for replica in self.replicas.values():
                replica.adopt()
            self._talk(idle=True)

    def _talk(self, idle: bool) -> None:
        for name in self.replicas:
            self._report(name, idle)
        # A merge may fall due by the last report of this tick, and its offer may be wanted within it: talk twice.
        for _ in range(2):
            for name, replica in self.replicas.items():
                reply = self._report(name, idle)
                for ask in replica.hear(reply.epoch, reply.asks):
                    given = replica.contribute(ask, STEP_TIME, self._learners[name].loss, idle)
                    numel = self.protocol.layout.fragments[given.fragment].numel
                    self._feed(Arrived.of(given, numel, self.protocol.settings.codec_block))
        for name in self.replicas:
            self._deliver(name, self._report(name, idle), idle)

    def _deliver(self, name: str, reply: Reply, idle: bool) -> None:
        learner, replica = self._learners[name], self.replicas[name]
        for offer in reply.offers:
            if replica.receive(offer):
                # A newer offer takes the place of one that waits, also in time: else none might ever be adopted.
                learner.adopt_at.setdefault(offer.fragment, self.ticks + self.protocol.settings.overlap_steps)
        due = [p for p, tick in learner.adopt_at.items() if idle or tick <= self.ticks]
        replica.adopt(due)
        for p in due:
            del learner.adopt_at[p]

    def _report(self, name: str, idle: bool) -> Reply:
        report = self.replicas[name].report(STEP_TIME, self._learners[name].loss, idle)
        self._feed(Reported(report))
        return self.protocol.reply(report, self._now)[0]

    @property
    def _now(self) -> float:
        return self.ticks * STEP_TIME

    def _feed(self, event: Event) -> None:
        self._carry_out(self.protocol.step(event, self._now))

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Merge(job):
                    self._feed(Published(job.run()))
                case Record(ticket):
                    self._feed(Recorded(ticket))
                case Grant(token, welcome):
                    self._welcomes[token] = welcome
                case Note():
                    self.notes.append(decision)
                case _:
                    pass  # nobody sleeps here, so nobody is woken
