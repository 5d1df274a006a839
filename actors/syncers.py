"""Keeps a run's syncer there, and with `syncer.standby` a second one, on another node where one has room for it."""

from __future__ import annotations

import logging
import math
import time

import ray

from actors.fleet import Fleet
from actors.lookout import Lookout
from actors.spec import SYNCER, RunSpec

_log = logging.getLogger(__name__)


class Syncers:
    """The wanted syncers, held against those that are there."""

    def __init__(self, spec: RunSpec, fleet: Fleet, lookout: Lookout):
        self._spec, self._fleet, self._lookout = spec, fleet, lookout
        self._failures = 0
        """Failures of syncers since one led."""
        self._moved: tuple[frozenset[str], float] = (frozenset(), -math.inf)
        """When (monotonic clock) the one that follows was last sent to another node, and the nodes that there were."""

    def make_missing(self) -> None:
        """Make those that are missing; a second one once the first has led, and apart from whoever leads."""
        look = self._lookout
        if look.syncer is None:
            if SYNCER in look.missing:
                self._fleet.syncer()
            return
        for name in self._spec.syncers:
            if name in look.missing:
                if self._spec.config.syncer.standby:
                    self._fleet.second_syncer(name, look.syncer.node_id)
                else:
                    self._fleet.syncer()

    def failed(self) -> str | None:
        """Why no syncer can lead. Where another one is well, it may, and the one that can't work is made anew."""
        look = self._lookout
        if look.leads:
            self._failures = 0
        errors = {name: look.errors[name] for name in self._spec.syncers if name in look.errors}
        self._failures += len(errors)
        if not errors:
            return None
        others = [name for name in self._spec.syncers if name not in errors and look.well(name)]
        if not others or self._failures > self._spec.config.supervisor.most_failed_starts:
            return next(iter(errors.values()))
        for name, error in errors.items():
            _log.warning("the %s failed: %s", name, error)
            self._end(name)
        return None

    def part(self) -> None:
        """Send the one that follows to another node than the leader's, when there is room on one."""
        look = self._lookout
        if look.syncer is None or not look.leads:
            return
        node_id = look.syncer.node_id
        for name in self._spec.syncers:
            beside = name != look.leader and look.well(name) and look.services[name].answer.node_id == node_id
            if beside and self._may_move(node_id):
                self._end(name)

    def _may_move(self, node_id: str) -> bool:
        """Whether there is room elsewhere; where it did not get to in time, only other nodes make for another try."""
        nodes = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        tried, at = self._moved
        if len(nodes) < 2 or (nodes == tried and time.monotonic() - at < self._spec.config.supervisor.start_deadline_s):
            return False
        if self._has_room_elsewhere(node_id):
            self._moved = nodes, time.monotonic()
            return True
        return False

    def _has_room_elsewhere(self, node_id: str) -> bool:
        from ray._private.state import available_resources_per_node  # there is no public way

        free = available_resources_per_node()
        return any(
            room.get("CPU", 0.0) >= self._spec.config.syncer.cpus for node, room in free.items() if node != node_id
        )

    def _end(self, name: str) -> None:
        self._fleet.end(name)
        self._lookout.forget(name)
