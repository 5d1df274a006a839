"""When the faults of the `chaos` group strike, and whom: a pure, seeded schedule."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.config import CORRUPTIONS, ChaosConfig, Fault

HOUR_S = 3600.0


@dataclass(frozen=True)
class Planned:
    """A fault of the schedule."""

    id: str
    """Its place in the list, or its kind and number: the tape knows it by this."""
    fault: Fault


class FaultPlan:
    """The faults of one run: those of the list, and at every rate a Poisson process of its own."""

    def __init__(self, chaos: ChaosConfig, budget: int):
        self._chaos, self._budget = chaos, budget
        self._moments = {kind: _moments(kind, rate, chaos.seed) for kind, rate in chaos.rates.items()}
        self._next = {kind: next(moments) for kind, moments in self._moments.items()}
        self._drawn: list[Planned] = []

    def due(self, struck: Collection[str], tokens: int, merging_s: float | None) -> list[Planned]:
        """What should have struck by now and has not; `merging_s`: seconds since the first merge, None before it."""
        listed = [Planned(str(i), fault) for i, fault in enumerate(self._chaos.faults)]
        due = [planned for planned in listed if self._has_come(planned.fault, tokens, merging_s)]
        if merging_s is not None:
            self._draw(merging_s)
        return [planned for planned in (*due, *self._drawn) if planned.id not in struck]

    def _has_come(self, fault: Fault, tokens: int, merging_s: float | None) -> bool:
        if fault.at_s is None:
            return tokens >= fault.at * self._budget
        return merging_s is not None and merging_s >= fault.at_s

    def _draw(self, merging_s: float) -> None:
        for kind, moments in self._moments.items():
            while self._next[kind] <= merging_s:
                number = sum(planned.fault.kind == kind for planned in self._drawn)
                chance = random.Random(f"{self._chaos.seed}/{kind}/{number}")
                how = chance.choice(CORRUPTIONS) if kind == "corrupt" else ""
                fault = Fault(kind, at_s=self._next[kind], seconds=self._chaos.seconds, how=how)
                self._drawn.append(Planned(f"{kind}-{number}", fault))
                self._next[kind] = next(moments)

    def victim(self, planned: Planned, well: Sequence[str]) -> str | None:
        """Whom it strikes of those that are well; None when there is nobody it may strike now."""
        if planned.fault.target:
            return planned.fault.target if planned.fault.target in well else None
        return random.Random(f"{self._chaos.seed}/{planned.id}").choice(sorted(well)) if well else None

    def rank(self, planned: Planned, ranks: int) -> int:
        """Which of so many workers of its victim it strikes, from 0."""
        return random.Random(f"{self._chaos.seed}/{planned.id}/rank").randrange(ranks)


def _moments(kind: str, rate: float, seed: int) -> Iterator[float]:
    """Seconds after the first merge."""
    chance, at = random.Random(f"{seed}/{kind}"), 0.0
    while True:
        at += chance.expovariate(rate / HOUR_S)
        yield at


def struck_faults(events: Sequence[dict[str, Any]]) -> set[str]:
    """Faults of the schedule that the tape knows of: a restarted supervisor or a resumed run does not repeat them."""
    return {event["id"] for event in events if event["kind"] == "fault" and event.get("id") is not None}
