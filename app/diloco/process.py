"""A learner's process in virtual time: it steps at its own pace, hears and answers the syncer, adopts, and may wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from app.diloco.agenda import Agenda, Line, Pace, Phase
from app.diloco.messages import Contribution, Offer, Reply, Report
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from app.diloco.slot_wait import SlotWait

LOOK_S = 1.0
"""A learner that waits speaks up this often, so that it does not count as hanging."""

InnerStep = Callable[[Replica, int], float]
"""Takes one inner step inside `replica.writing(tokens)`, given the global token count; returns the loss."""


@dataclass(frozen=True)
class Body:
    """What a process trains: the parameters by name, and the inner step on them."""

    parameters: Mapping[str, torch.Tensor]
    inner_step: InnerStep


@dataclass(frozen=True)
class SteppedLearner:
    """One learner: its pace, and how a process of it starts."""

    name: str
    start: Callable[[], Body]
    pace: Pace


@dataclass(frozen=True)
class Letter:
    """What a learner sends: a report, and in a poll the answers to what it was asked; a poll is answered."""

    report: Report
    given: tuple[Contribution, ...]
    poll: bool


class Process:
    """One process of a learner, from its join to its death or the end of the run."""

    def __init__(
        self,
        learner: SteppedLearner,
        body: Body,
        replica: Replica,
        settings: DilocoSettings,
        agenda: Agenda,
        chance: random.Random,
        post: Callable[[Process, Letter], None],
        tokens: Callable[[], int],
        adopt_on_arrival: bool,
        left: Callable[[], None],
    ):
        """`post` takes a letter that arrived at the syncer; `tokens` gives the global token count.

        `left` hears that it has handed in and is gone.
        """
        self.name, self.replica = learner.name, replica
        self.dead = False
        self._pace, self._inner_step, self._settings = learner.pace, body.inner_step, settings
        self._agenda, self._post, self._tokens = agenda, post, tokens
        self._up, self.down = Line(agenda, learner.pace, chance), Line(agenda, learner.pace, chance)
        self._adopt_on_arrival, self._left = adopt_on_arrival, left
        self._leaves = False
        self._slot_wait = SlotWait(settings, joined_at=replica.clock) if settings.blocking else None
        self._waiting = False
        """Stands still for a merged fragment."""
        self._loss = float("nan")
        self._idle = False
        self._steps = 0
        self._plan = 0
        """Number of the newest plan for a step or a boundary: older ones are void."""
        self._boundary_at = agenda.now
        self._captured: dict[int, int] = {}
        """Fragment → own steps made when it was last captured."""
        self._adopt_at: dict[int, int] = {}
        """Fragment → own steps made when the offer in the inbox is adopted."""
        self._heard_late: Reply | None = None
        """Told to finish in the middle of a step."""
        self._send((), poll=True)
        self._go()

    def die(self) -> None:
        """Nothing more happens here; what is on the wire arrives."""
        self.dead = True
        self._plan += 1

    def leave(self) -> None:
        """At the end of the step under way it stops, and hands in what it has."""
        self._leaves = True

    # ---- stepping

    def _go(self) -> None:
        self._planned(self._agenda.now + self._pace.step_s, Phase.STEP, self._step)

    def _planned(self, at: float, phase: Phase, action: Callable[[], None]) -> None:
        self._plan += 1
        self._agenda.add(at, phase, partial(self._if_current, self._plan, action))

    def _if_current(self, plan: int, action: Callable[[], None]) -> None:
        if plan == self._plan:
            action()

    def _step(self) -> None:
        self._loss = self._inner_step(self.replica, self._tokens())
        self._steps += 1
        self._send((), poll=False)
        self._planned(self._agenda.now, Phase.BOUNDARY, self._boundary)

    def _boundary(self) -> None:
        """Between two steps: adopt what is due, then finish, wait or go on."""
        self._boundary_at = self._agenda.now
        reply, self._heard_late = self._heard_late, None
        if reply is not None:
            self.hear(reply)
            return
        if self._leaves:
            self.replica.leaving = self._idle = True
            self._adopt(list(self._adopt_at))
            self._send((), poll=False)
            return
        self._adopt([p for p, steps in self._adopt_at.items() if steps <= self._steps])
        if self._must_wait():
            self._adopt(list(self._adopt_at))
        self._waiting = self._must_wait()
        if self._waiting:
            self._send((), poll=False)
            self._planned(self._agenda.now + LOOK_S, Phase.BOUNDARY, self._boundary)
        else:
            self._go()

    def _must_wait(self) -> bool:
        return self._slot_wait is not None and self._slot_wait.holds(*self.replica.clocks(), self._agenda.now)

    # ---- hearing

    def hear(self, reply: Reply) -> None:
        """The answer to the poll arrives: asks are answered at once, offers wait for the step boundary."""
        if self.dead:
            return
        if reply.fenced:
            assert self.replica.leaving, "a living process was fenced"
            self.die()
            self._left()
            return
        if reply.finish and self._in_step:
            self._heard_late = reply  # the step under way still counts
            return
        if reply.finish:
            self._plan += 1
            self._idle, self._waiting = True, False
        asks = self.replica.hear(reply.epoch, reply.asks)
        for offer in reply.offers:
            self._receive(offer)
        if self._idle:
            self._adopt(list(self._adopt_at))
        self._captured |= {ask.fragment: self._steps for ask in asks}
        given = [self.replica.contribute(ask, self._pace.step_s, self._loss, self._idle) for ask in asks]
        self._send(given, poll=True)
        if self._waiting:
            self._planned(self._agenda.now, Phase.BOUNDARY, self._boundary)

    @property
    def _in_step(self) -> bool:
        return not self._idle and not self._waiting and self._agenda.now > self._boundary_at

    def _receive(self, offer: Offer) -> None:
        """Adopted τ own steps after the capture, as if the answer had taken that long, or when it arrives."""
        if self.replica.receive(offer):
            p, due = offer.fragment, 0
            if p in self._captured and not self._adopt_on_arrival:
                due = self._captured[p] + self._settings.overlap_steps
            # A newer offer takes the place of one that waits, also in time: else none might ever be adopted.
            self._adopt_at.setdefault(p, due)

    def _adopt(self, fragments: Collection[int]) -> None:
        self.replica.adopt(fragments)
        for p in fragments:
            del self._adopt_at[p]

    def _send(self, given: Sequence[Contribution], poll: bool) -> None:
        report = self.replica.report(self._pace.step_s, self._loss, self._idle)
        self._up.send(partial(self._post, self, Letter(report, tuple(given), poll)))
