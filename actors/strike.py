"""Carries out the faults of the `chaos` group: real ones, on real processes."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from actors.chaos import fill_disk, kill_node, send_signal, slow_down
from actors.fleet import Fleet
from actors.learner import LearnerStatus
from actors.lookout import Lookout
from actors.monitor import Monitor
from actors.spec import LEDGER, SUPERVISOR, SYNCER, RunSpec
from actors.syncer_status import SyncerStatus
from app.config import LEARNER_FAULTS
from app.run import tape
from app.run.faults import FaultPlan, Planned, struck_faults
from app.run.remote import patiently

_log = logging.getLogger(__name__)

DISK = "disk"
HEAD = "node:__internal_head__"
"""Resource that Ray gives the head alone."""
LASTING = ("freeze", "slow", "mute", "corrupt", "preempt", "freeze_syncer", "fill_disk", "kill_site")
DEADLY = ("kill", "kill_worker", "preempt", "kill_node", "kill_site")
AT_ONCE = {"kill": signal.SIGKILL, "kill_worker": signal.SIGKILL, "freeze": signal.SIGSTOP, "preempt": signal.SIGTERM}
AFTERWARDS = {
    "freeze": signal.SIGCONT,
    "slow": signal.SIGCONT,
    "preempt": signal.SIGKILL,
    "freeze_syncer": signal.SIGCONT,
}


class Striker:
    """The schedule of one run's faults, which of them have struck, and which last."""

    def __init__(self, spec: RunSpec, fleet: Fleet, lookout: Lookout, monitor: Monitor):
        self._spec, self._fleet, self._lookout, self._monitor = spec, fleet, lookout, monitor
        self._plan = FaultPlan(spec.config.chaos, spec.config.train.tokens)
        self._struck: set[str] = set()
        self._victims: set[tuple[str, int]] = set()
        self._dead: set[tuple[str, int]] = set()
        """Victims that are gone, although their last answer may still be there."""
        self._lasting: list[dict[str, Any]] = []
        """Events of faults that have not ended."""
        self._merging_since: float | None = None
        self._ended: int | None = None
        """Process id of a ledger that was killed, until the next one answers."""
        self._doomed = False
        """This process is to be killed, once the tape knows: the next one would do it again."""

    def recall(self) -> None:
        """Read from the tape what a supervisor before this one did."""
        events = patiently(lambda: tape.read(self._spec.tape))[0]
        self._struck = struck_faults(events)
        self._merging_since = next((event["at"] for event in events if event["kind"] == "merge"), None)
        faults = [event for event in events if event["kind"] == "fault"]
        self._lasting = [event for event in faults if event.get("ends_at", 0.0) > time.time()]
        self._victims = {(event["target"], event["incarnation"]) for event in faults}
        self._dead = {(e["target"], e["incarnation"]) for e in faults if e["fault"] in DEADLY}
        ledger, own = (_last_turn(events, service) for service in (LEDGER, SUPERVISOR))
        self._ended = ledger["pid"] if ledger and ledger["kind"] == "fault" else None
        if own and own["kind"] == "fault":
            self._monitor.note("back", target=SUPERVISOR)

    def struck(self, target: str, incarnation: int) -> bool:
        """Whether this incarnation (of the syncer: epoch) was a fault's target."""
        return (target, incarnation) in self._victims

    def calm(self, at: float = math.inf) -> None:
        """End what has lasted until then, by default everything."""
        for event in [event for event in self._lasting if at >= event["ends_at"]]:
            self._lasting.remove(event)
            self._end(event)

    def strike(self, syncer: SyncerStatus) -> None:
        """Let strike what is due, unless the run is ending, and end what has lasted long enough."""
        self.calm(time.time())
        if syncer.finishing or syncer.ended is not None:
            return
        ledger = self._lookout.services[LEDGER].answer
        if self._ended not in (None, ledger and ledger.pid) and self._lookout.well(LEDGER):
            self._ended = None
            self._monitor.note("back", target=LEDGER)
        for event in self._lasting:
            if event["fault"] == "kill_site":  # a region that is dark: whoever comes up there goes down again
                for learner in self._on_site(event["site"]):
                    if learner.learner in self._lookout.learners:
                        self._send(learner.node_id, learner.pid, signal.SIGKILL)
        if self._merging_since is None and syncer.merges > 0:
            self._merging_since = time.time()
        merging_s = None if self._merging_since is None else time.time() - self._merging_since
        for planned in self._plan.due(self._struck, syncer.tokens, merging_s):
            self._strike(planned)
        if self._doomed and not self._monitor.behind:
            os.kill(os.getpid(), signal.SIGKILL)

    # ---- whom

    def _strike(self, planned: Planned) -> None:
        kind = planned.fault.kind
        if kind in LEARNER_FAULTS:
            learner = self._plan.victim(planned, self._well(kind))
            if learner is not None:  # else the next look tries again
                self._strike_learner(planned, self._lookout.learners[learner])
        elif kind == "kill_site":
            victims = self._on_site(planned.fault.target)
            if any(not victim.incarnation or victim.learner in self._lookout.silent for victim in victims):
                return  # it goes dark when it is whole
            for victim in victims:
                self._note(planned, victim.learner, victim.incarnation, victim, site=planned.fault.target)
                self._send(victim.node_id, victim.pid, signal.SIGKILL)
        elif kind == "kill_supervisor":
            here = ray.get_runtime_context().get_node_id()
            self._note(planned, SUPERVISOR, 0, None, pid=os.getpid(), node=here)
            self._doomed = True
        else:
            self._strike_service(planned)

    def _well(self, kind: str) -> list[str]:
        """Learners that this may strike now: those that answer, have joined, and have no other fault."""
        struck = {event["target"] for event in self._lasting}
        apart = self._services() if kind == "kill_node" else set()
        return [
            name
            for name, status in self._lookout.learners.items()
            if name not in self._lookout.silent | struck
            and status.incarnation > 0
            and (name, status.incarnation) not in self._dead
            and status.node_id not in apart
        ]

    def _services(self) -> set[str]:
        """Nodes that a fault of a node spares: those of services, and the head."""
        found = {
            answer.node_id for service in self._lookout.services.values() if (answer := service.answer) is not None
        }
        heads = {node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"]}
        return {*found, *heads, ray.get_runtime_context().get_node_id()}

    def _on_site(self, site: str) -> list[LearnerStatus]:
        """Learners of a pool, or on nodes with a label (`label=value`), as they were when they answered last."""
        label, _, value = site.partition("=")
        nodes = {node["NodeID"] for node in ray.nodes() if value and node["Labels"].get(label) == value}
        pool_of = self._spec.config.pool_of
        learners = [status for _, status in self._lookout.seen.values()]
        return [s for s in learners if not nodes.isdisjoint(_nodes_of(s)) or pool_of(s.learner).name == site]

    # ---- what

    def _strike_learner(self, planned: Planned, victim: LearnerStatus) -> None:
        fault = planned.fault
        also = {"how": fault.how} if fault.kind == "corrupt" else {}
        on_node = [other for other in self._lookout.learners.values() if victim.node_id in _nodes_of(other)]
        if fault.kind == "kill_worker" and victim.ranks:
            rank = victim.ranks[self._plan.rank(planned, len(victim.ranks))]
            victim = replace(victim, pid=rank.pid, node_id=rank.node_id)
        for other in on_node if fault.kind == "kill_node" else [victim]:
            self._note(planned, other.learner, other.incarnation, other, **also)
        match fault.kind:
            case "slow":
                self._try(slow_down, victim.node_id, victim.pid, fault.factor, fault.seconds)
            case "mute":
                self._tell(victim.learner, "mute", fault.seconds)
            case "corrupt":
                self._tell(victim.learner, "corrupt", fault.how or "flip", fault.seconds)
            case "kill_node":
                self._try(kill_node, victim.node_id)
            case _:
                self._send(victim.node_id, victim.pid, AT_ONCE[fault.kind])

    def _strike_service(self, planned: Planned) -> None:
        kind = planned.fault.kind
        name = LEDGER if kind == "kill_ledger" else SYNCER
        struck = {event["target"] for event in self._lasting}
        well = self._lookout.leads if name == SYNCER else self._lookout.well(LEDGER)
        if not well or name in struck or DISK in struck:
            return
        answer: Any = self._lookout.syncer if name == SYNCER else self._lookout.services[LEDGER].answer
        incarnation = answer.epoch if name == SYNCER else 0
        if kind == "fill_disk":
            writers = [self._lookout.services[writer].answer for writer in (*self._spec.syncers, LEDGER)]
            pids = [writer.pid for writer in writers if writer is not None and writer.node_id == answer.node_id]
            self._note(planned, DISK, 0, answer, pids=pids)
            self._fill(answer.node_id, pids, full=True)
            return
        self._note(planned, name, incarnation, answer)
        self._ended = answer.pid if name == LEDGER else self._ended
        self._send(answer.node_id, answer.pid, signal.SIGSTOP if kind == "freeze_syncer" else signal.SIGKILL)

    def _note(self, planned: Planned, target: str, incarnation: int, victim: Any, **more: Any) -> None:
        """On the tape before it happens: a supervisor that is killed must not strike twice."""
        fault = planned.fault
        now = time.time()
        event = {
            "fault": fault.kind,
            "target": target,
            "incarnation": incarnation,
            "id": planned.id,
            "struck_at": now,
            "ends_at": now + fault.seconds if fault.kind in LASTING else now,
            **({} if victim is None else {"pid": victim.pid, "node": victim.node_id}),
            **more,
        }
        self._struck.add(planned.id)
        self._victims.add((target, incarnation))
        if fault.kind in DEADLY:
            self._dead.add((target, incarnation))
        self._monitor.note("fault", **event)
        if fault.kind in LASTING:
            self._lasting.append(event)

    def _end(self, event: dict[str, Any]) -> None:
        if event["fault"] == "fill_disk":
            self._fill(event["node"], event["pids"], full=False)
        elif event["fault"] in AFTERWARDS:
            self._send(event["node"], event["pid"], AFTERWARDS[event["fault"]])

    def _fill(self, node_id: str, pids: Sequence[int], full: bool) -> None:
        self._try(fill_disk, node_id, self._spec.checkpoints, pids, full)

    def _send(self, node_id: str, pid: int, number: signal.Signals) -> None:
        self._try(send_signal, node_id, pid, number)

    def _tell(self, learner: str, method: str, *args: Any) -> None:
        handle = self._fleet.find(learner)
        if handle is not None:
            getattr(handle, method).remote(*args)

    def _try(self, do: Callable[..., None], *args: Any) -> None:
        """A victim may have gone by itself."""
        try:
            do(*args)
        except (RayError, OSError, TimeoutError) as error:
            _log.warning("%s%s failed: %s", do.__name__, args, error)


def _last_turn(events: Sequence[dict[str, Any]], service: str) -> dict[str, Any] | None:
    """The last that the tape knows of a service: that it was struck, or that it was back."""
    turns = [event for event in events if event["kind"] in ("fault", "back") and event["target"] == service]
    return turns[-1] if turns else None


def _nodes_of(learner: LearnerStatus) -> set[str]:
    """Nodes that any of its workers is on."""
    return {learner.node_id, *(rank.node_id for rank in learner.ranks)}
