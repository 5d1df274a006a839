"""What a run waits for: actors that have no place in the cluster yet, as when no node is large enough for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group_table

from actors.spec import SYNCER, RunSpec

LOOK_EVERY_S = 10.0
MOST_NAMES = 4


class Waits:
    """Tells each wait once, when it has lasted from one look to the next: short ones are part of every start."""

    def __init__(self, look: Callable[[], list[str]]):
        self._look = look
        self._seen: list[str] = []
        self._looked_at: float | None = None
        self.open: list[str] = []
        """What is waited for now, as far as it has been told."""

    def news(self, now: float) -> list[str]:
        """Lines about what is waited for, at most one look every few seconds. `now` is monotonic, in seconds."""
        if self._looked_at is not None and now - self._looked_at < LOOK_EVERY_S:
            return []
        self._looked_at, before, told = now, self._seen, self.open
        self._seen = self._look()
        self.open = [wait for wait in self._seen if wait in before]
        return [f"waiting for {wait}" for wait in self.open if wait not in told]


def unplaced(spec: RunSpec) -> list[str]:
    """What is missing for whom, for example `a node with 0.5 CPU for the syncer`; empty when everybody has a place."""
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        waiting: dict[str, list[str]] = {}
        if _has_no_process(SYNCER, spec.namespace):
            place = _place({"CPU": spec.config.syncer.cpus}, nodes, infeasible=False)
            waiting.setdefault(place, []).append("the syncer")
        groups = {spec.group_name(learner): learner for learner in spec.config.learner_ids}
        for entry in placement_group_table().values():
            if entry["name"] in groups and entry["state"] in ("PENDING", "RESCHEDULING"):
                never = entry["stats"]["scheduling_state"] == "INFEASIBLE"
                place = _place(entry["bundles"][0], nodes, never)
                waiting.setdefault(place, []).append(groups[entry["name"]])
    except RayError:
        return []  # the cluster's head is away
    return [f"{place} for {_names(who)}" for place, who in waiting.items()]


def _has_no_process(name: str, namespace: str) -> bool:
    """Whether Ray has not found a place for this actor; one that starts has a process already."""
    from ray._private.state import actors  # there is no public way that works without a dashboard

    try:
        handle = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False  # nobody has asked for it yet
    entry: dict[str, Any] = actors(handle._actor_id.hex())
    return entry.get("State") == "PENDING_CREATION" and entry["Pid"] == 0


def _place(wanted: Mapping[str, float], nodes: list[dict[str, float]], infeasible: bool) -> str:
    amounts = ", ".join(f"{amount:g} {resource}" for resource, amount in wanted.items())
    if not any(all(node.get(resource, 0.0) >= amount for resource, amount in wanted.items()) for node in nodes):
        return f"a node with {amounts}"
    return f"a node with {amounts} and the labels asked for" if infeasible else f"{amounts} to become free"


def _names(who: list[str]) -> str:
    return ", ".join(sorted(who)) if len(who) <= MOST_NAMES else f"{len(who)} learners"
