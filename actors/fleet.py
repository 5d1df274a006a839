"""Where the run's actors are in the cluster: placing, finding, ending them. Keeps no state but their names."""

from __future__ import annotations

import logging
import math
import signal
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.chaos import send_signal
from actors.evaluator import Evaluator
from actors.learner import HANG_SIGNAL, Learner
from actors.ledger import Ledger
from actors.rendezvous import Rendezvous
from actors.spec import EVALUATOR, LEDGER, RENDEZVOUS, SYNCER, RunSpec
from actors.standby import PairedSyncer
from actors.stream_ledger import STREAM_CALLS, StreamLedger
from actors.syncer import Syncer
from app.run.growth import Place

_log = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives every node."""


PLACES = {"CREATED": Place.PLACED, "RESCHEDULING": Place.MOVING}
"""States of Ray's placement groups; in all others a group waits for its place."""


@dataclass(frozen=True)
class Placed:
    """A learner's placement group."""

    group_id: str
    place: Place
    nodes: frozenset[str]
    """Nodes of its workers; empty while it waits."""


class Fleet:
    """The actors of one run."""

    def __init__(self, spec: RunSpec):
        self._spec = spec

    def _options(self, name: str, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "namespace": self._spec.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            **self._spec.process,
            **more,
        }

    def _service(self, name: str, **more: Any) -> dict[str, Any]:
        """Options of an actor that all learners depend on: its node is to last."""
        return self._options(name, label_selector=self._spec.config.syncer.labels, **more)

    def syncer(self) -> Any:
        """The syncer, made when it is missing."""
        options = self._service(SYNCER, num_cpus=self._spec.config.syncer.cpus)
        if self._spec.config.syncer.standby:
            return ray.remote(PairedSyncer).options(**options).remote(self._spec, SYNCER)
        return ray.remote(Syncer).options(**options).remote(self._spec)

    def second_syncer(self, name: str, leader_node: str) -> Any:
        """The syncer that does not lead, made when it is missing; apart from the leader, if a node has room."""
        options = self._service(name, num_cpus=self._spec.config.syncer.cpus)
        stable = options["label_selector"]
        apart = {NODE_LABEL: f"!{leader_node}", **stable}
        options |= {"label_selector": apart, "fallback_strategy": [{"label_selector": stable}]}
        return ray.remote(PairedSyncer).options(**options).remote(self._spec, name)

    def end(self, name: str) -> None:
        """End an actor for good, if there is one; one of its name may be made anew."""
        handle = self.find(name)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    def ledger(self) -> Any:
        """The data ledger, made when it is missing."""
        spec, config = self._spec, self._spec.config
        options = self._service(LEDGER, num_cpus=0)
        if config.data.streaming:
            options["max_concurrency"] = STREAM_CALLS
            return ray.remote(StreamLedger).options(**options).remote(spec)
        where = (spec.checkpoints, config.run.seed, spec.samples, config.data.block_samples)
        return ray.remote(Ledger).options(**options).remote(*where)

    def evaluator(self) -> Any:
        """The evaluator, made when it is missing. One call works, another says that the process is well."""
        options = self._service(EVALUATOR, num_cpus=0, max_concurrency=2)
        return ray.remote(Evaluator).options(**options).remote(self._spec)

    def rendezvous(self) -> Any:
        """Where the learners of a data-parallel run meet, made when it is missing."""
        members, elastic = self._spec.config.learner_ids, self._spec.config.train.elastic
        return ray.remote(Rendezvous).options(**self._service(RENDEZVOUS, num_cpus=0)).remote(members, elastic)

    def learner(self, learner: str) -> Any:
        """A learner in its placement group, made when it is missing; pending until the cluster has room."""
        pool = self._spec.config.pool_of(learner).settings
        strategy = PlacementGroupSchedulingStrategy(self._group(learner), placement_group_bundle_index=0)
        options = self._options(
            learner,
            num_cpus=pool.cpus_per_worker,
            num_gpus=pool.gpus_per_worker,
            resources=dict(pool.resources_per_worker),
            scheduling_strategy=strategy,
            max_concurrency=4,
        )
        return ray.remote(Learner).options(**options).remote(self._spec, learner)

    def _group(self, learner: str) -> Any:
        name = self._spec.group_name(learner)
        try:
            return ray.util.get_placement_group(name)
        except ValueError:
            pool = self._spec.config.pool_of(learner).settings
            workers = pool.workers_per_learner
            return placement_group(
                [pool.resources] * workers,
                strategy="STRICT_PACK" if pool.one_node else "PACK",
                name=name,
                lifetime="detached",
                bundle_label_selector=[pool.labels] * workers if pool.labels else None,
            )

    def find(self, name: str) -> Any | None:
        """A fresh handle of a named actor of the run, None when there is none."""
        try:
            return ray.get_actor(name, namespace=self._spec.namespace)
        except (ValueError, RayError):
            return None

    def end_process(self, node_id: str, pid: int, handle: Any) -> None:
        """End an actor's process, even a stopped one, so that Ray starts it anew; its log says where it was."""
        try:
            send_signal(node_id, pid, HANG_SIGNAL)
            send_signal(node_id, pid, signal.SIGKILL)
        except (RayError, TimeoutError, OSError) as error:
            _log.info("no signal to %s on %s: %s", pid, node_id, error)
            ray.kill(handle, no_restart=False)

    def places(self) -> dict[str, Placed]:
        """Every learner that was asked for, and the nodes it has a place on."""
        found = {}
        start = self._spec.group_name("")
        for group_id, entry in placement_group_table().items():
            if entry["name"].startswith(start) and entry["state"] != "REMOVED":
                nodes = frozenset(entry["bundles_to_node_id"].values()) - {""}
                place = PLACES.get(entry["state"], Place.WAITING)
                found[entry["name"].removeprefix(start)] = Placed(group_id, place, nodes)
        return found

    def draining(self) -> dict[str, float]:
        """Nodes that are to go away, and the seconds that they have left."""
        from ray._private.state import state  # there is no public way

        nodes: dict[str, int] = state.get_draining_nodes()
        return {node: at / 1000 - time.time() if at else math.inf for node, at in nodes.items()}

    def drop(self, learner: str, group_id: str) -> None:
        """End a learner, then give back its place; this order, else a restartable actor can hang."""
        self.end(learner)
        remove_placement_group(_group_by_id(group_id))

    def end_learners(self) -> None:
        """End all learners, and give back their places."""
        places = self.places()
        for learner in places:
            self.end(learner)
        for placed in places.values():
            remove_placement_group(_group_by_id(placed.group_id))

    def end_services(self, leader: str = SYNCER) -> None:
        """End everything else but the supervisor; the syncer that leads last, so that no other one takes over."""
        for name in sorted((EVALUATOR, RENDEZVOUS, LEDGER, *self._spec.syncers), key=lambda name: name == leader):
            self.end(name)


def _group_by_id(group_id: str) -> Any:
    from ray.util.placement_group import PlacementGroup, PlacementGroupID

    return PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))
