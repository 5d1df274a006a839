"""Keeps the wanted learners in the cluster: asks for them, sends away those that have to go, and ends them.

Which ones are wanted is decided in `app.run.growth`. What a restart needs is read back: placement groups from Ray, what
`scale` changed from the tape. A node that is to go away says so (Ray's draining): its learners hand in first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.fleet import Fleet, Placed
from actors.lookout import Lookout
from actors.monitor import Monitor
from actors.spec import RunSpec
from app.diloco.handing_in import LEFT
from app.run.growth import Add, Growth, Place, Send, Withdraw

_log = logging.getLogger(__name__)

SCALED = "scaled"
"""Kind of the event that says how many learners a pool may have from now on."""
GONE = "left"
"""State of a learner that has handed in, or had no time for it."""
MARGIN_S = 2.0
"""A learner is to be gone so many seconds before its node."""


@dataclass(frozen=True)
class _Leave:
    """A learner that was told to go."""

    reason: str
    told_at: float
    """Monotonic clock, like `until`."""
    until: float


class Roster:
    """The learners of a run."""

    def __init__(self, spec: RunSpec, fleet: Fleet, lookout: Lookout, monitor: Monitor, attempt: str):
        """`attempt` names this start of the run."""
        self._spec, self._fleet, self._lookout, self._monitor = spec, fleet, lookout, monitor
        self._attempt = attempt
        config = spec.config
        sizes = config.pool_sizes
        most = {name: size if (m := config.pools[name].max_learners) is None else m for name, size in sizes.items()}
        self._growth = Growth(config.learner_ids, most, sizes, config.elastic)
        self._leaving: dict[str, _Leave] = {}
        self._placed: dict[str, Placed] = {}
        """Those that the tape knows to have a place."""

    @property
    def present(self) -> tuple[str, ...]:
        """Learners that have a place, or that the run starts with; not those that wait for a chance."""
        waiting = {x for x in self._lookout.wanted - self._placed.keys() if x not in self._spec.config.learner_ids}
        return tuple(sorted(self._lookout.wanted - waiting))

    def recall(self, scaled: Sequence[dict[str, Any]]) -> None:
        """Go on where an earlier process of the supervisor was. `scaled`: such events of this attempt."""
        for event in scaled:
            self._growth.scale(event["pool"], event["most"])
        self._placed = {x: placed for x, placed in self._fleet.places().items() if placed.place is Place.PLACED}
        self._lookout.wanted |= self._fleet.places().keys()

    def check(self, pool: str, most: int) -> None:
        """Refuse what `scale` can't do. Raises ValueError, which says what is allowed."""
        self._growth.check(pool, most)

    def scale(self, pool: str, most: int) -> None:
        """Let a pool have so many learners at most from now on. Raises ValueError."""
        self._growth.scale(pool, most)
        self._monitor.note(SCALED, attempt=self._attempt, pool=pool, most=most)

    def look(self) -> None:
        """One look at the places and at the nodes that go, and what follows."""
        places = self._fleet.places()
        self._take_note(places)
        self._send_from_nodes_that_go(places)
        there = {learner: placed.place for learner, placed in places.items()}
        for wish in self._growth.look(there, self._leaving, time.monotonic()):
            match wish:
                case Add(learner):
                    self._ask_for(learner)
                case Withdraw(learner):
                    self._drop(learner, "withdrawn", places)
                case Send(learner, reason):
                    self._send(learner, reason, self._spec.config.elastic.hand_in_s)
        self._end_those_that_left(places)
        for learner in sorted(self._lookout.missing & self._lookout.wanted - self._leaving.keys()):
            self._fleet.learner(learner)
        self._lookout.unplaced = {x for x in self._lookout.wanted if there.get(x) is not Place.PLACED}

    def _ask_for(self, learner: str) -> None:
        self._fleet.learner(learner)
        self._lookout.wanted.add(learner)

    def _take_note(self, places: dict[str, Placed]) -> None:
        for learner, placed in places.items():
            if placed.place is Place.PLACED and learner not in self._placed:
                self._monitor.note("placed", learner=learner, pool=self._spec.config.pool_of(learner).name)
        for learner in self._placed:
            if learner in places and places[learner].place is not Place.PLACED:
                self._monitor.note("removed", learner=learner, reason="its node is gone")
        self._placed = {learner: placed for learner, placed in places.items() if placed.place is Place.PLACED}

    def _send_from_nodes_that_go(self, places: dict[str, Placed]) -> None:
        going = self._fleet.draining()
        for learner, placed in places.items():
            left_s = [going[node] for node in placed.nodes if node in going]
            if left_s and learner not in self._leaving:
                if learner not in self._spec.config.learner_ids:
                    self._growth.lost(learner, time.monotonic())
                self._send(learner, "its node goes", min(self._spec.config.elastic.hand_in_s, *left_s))

    def _send(self, learner: str, reason: str, seconds: float) -> None:
        now, seconds = time.monotonic(), max(0.0, seconds - MARGIN_S)
        self._leaving[learner] = _Leave(reason, now, now + seconds)
        handle = self._fleet.find(learner)
        self._monitor.note("leaving", learner=learner, reason=reason, seconds=seconds)
        if handle is not None:
            handle.leave.remote(seconds)

    def _end_those_that_left(self, places: dict[str, Placed]) -> None:
        for learner, leave in list(self._leaving.items()):
            status = self._lookout.learners.get(learner)
            left = status is not None and status.state == GONE
            unheard = learner not in self._lookout.seen and time.monotonic() > leave.told_at + MARGIN_S
            if left or unheard or learner not in places or time.monotonic() > leave.until + MARGIN_S:
                self._drop(learner, leave.reason, places)

    def _drop(self, learner: str, reason: str, places: dict[str, Placed]) -> None:
        seen = self._lookout.seen.get(learner)
        if seen is not None and seen[1].incarnation > 0:
            self._monitor.tell("lost", learner, seen[1].incarnation, LEFT)
        try:
            if learner in places:
                self._fleet.drop(learner, places[learner].group_id)
            else:
                self._fleet.end(learner)
        except RayError as error:
            _log.warning("%s could not be ended: %s", learner, error)
            return
        if learner in self._placed:
            self._monitor.note("removed", learner=learner, reason=reason)
        self._leaving.pop(learner, None)
        self._placed.pop(learner, None)
        self._lookout.drop(learner)
