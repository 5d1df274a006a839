"""Virtual time: what happens when, and in which order at one moment. No clock, no thread."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

Action = Callable[[], None]


class Phase(IntEnum):
    """What comes first among things of the same moment; within a phase, what was planned first."""

    STEP = 0  # inner steps end
    MESSAGE = 1  # messages arrive, merges are done, learners die and come back
    BOUNDARY = 2  # learners adopt and go on: an answer that took no time is in


class Agenda:
    """What is planned, in virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, Phase, int, Action]] = []
        self._order = itertools.count()

    def add(self, at: float, phase: Phase, action: Action) -> None:
        """Plan `action` for the moment `at`."""
        heapq.heappush(self._planned, (at, phase, next(self._order), action))

    @property
    def next_at(self) -> float:
        """The next moment at which something is planned; infinite when nothing is."""
        return self._planned[0][0] if self._planned else math.inf

    def run(self) -> None:
        """Do what is planned up to now, and what that plans for now."""
        while self.next_at <= self.now:
            heapq.heappop(self._planned)[3]()


@dataclass(frozen=True)
class Pace:
    """How fast a learner and its line to the syncer are, in virtual seconds."""

    step_s: float = 1.0
    """An inner step."""
    delay_s: float = 0.0
    """What a message takes, each way."""
    jitter_s: float = 0.0
    """A message takes up to this much longer: a different part of it each time."""


class Line:
    """One direction between a learner and the syncer: messages arrive in the order in which they were sent."""

    def __init__(self, agenda: Agenda, pace: Pace, chance: random.Random):
        self._agenda, self._pace, self._chance = agenda, pace, chance
        self._last_at = 0.0

    def send(self, arrive: Action) -> None:
        """Have `arrive` called after the delay."""
        delay = self._pace.delay_s + self._pace.jitter_s * self._chance.random()
        self._last_at = max(self._last_at, self._agenda.now + delay)
        self._agenda.add(self._last_at, Phase.MESSAGE, arrive)


@dataclass(frozen=True)
class Kill:
    """The death of a learner's process: what of its work no merge holds is lost."""

    learner: str
    at_s: float
    notice_s: float
    """From the death until the syncer is told of it."""
    away_s: float
    """From the death until its next process trains."""


def kills_every(
    every_s: float, learners: Sequence[str], notice_s: float, away_s: float, chance: random.Random
) -> Iterator[Kill]:
    """One kill every `every_s` seconds, for ever, of a learner drawn by `chance`."""
    for n in itertools.count(1):
        yield Kill(chance.choice(learners), n * every_s, notice_s, away_s)
