"""Carries out the faults of the `chaos` group: real signals to real processes."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from actors.chaos import send_signal
from actors.lookout import Lookout
from actors.spec import SYNCER, RunSpec
from actors.syncer_status import SyncerStatus
from app.config import Fault
from app.run import tape
from app.run.faults import due_faults, struck_faults

_log = logging.getLogger(__name__)

SIGNAL_TIMEOUT_S = 10.0
SIGNALS = {"kill": signal.SIGKILL, "kill_syncer": signal.SIGKILL, "freeze": signal.SIGSTOP}


class Striker:
    """The schedule of one run's faults, and which of them have struck."""

    def __init__(self, spec: RunSpec, lookout: Lookout):
        self._spec, self._lookout = spec, lookout
        self._struck: set[int] = set()
        self._victims: set[tuple[str, int]] = set()
        self._thaws: list[tuple[float, str, int]] = []
        """(when, of the monotonic clock; node; process id)"""

    def recall(self) -> None:
        """Read from the tape what a supervisor before this one did."""
        events = tape.read(self._spec.tape)[0]
        self._struck = struck_faults(events)
        self._thaws = _thaws(events)

    def struck(self, learner: str, incarnation: int) -> bool:
        """Whether this incarnation (of the syncer: epoch) was a fault's target."""
        return (learner, incarnation) in self._victims

    def strike(self, tokens: int, note: Callable[..., None]) -> None:
        """Let everything strike whose moment has come, and thaw what was frozen long enough."""
        for thaw in [thaw for thaw in self._thaws if time.monotonic() >= thaw[0]]:
            self._thaws.remove(thaw)
            self._send(thaw[1], thaw[2], signal.SIGCONT)
        faults = self._spec.config.chaos.faults
        for index in due_faults(faults, self._struck, tokens, self._spec.config.train.tokens):
            self._strike(index, faults[index], note)

    def _strike(self, index: int, fault: Fault, note: Callable[..., None]) -> None:
        target = SYNCER if fault.kind == "kill_syncer" else fault.target
        victim = self._lookout.syncer if target == SYNCER else self._lookout.learners.get(target)
        if victim is None or target in self._lookout.silent:
            return  # not there now: the next look tries again
        incarnation = victim.epoch if isinstance(victim, SyncerStatus) else victim.incarnation
        if incarnation == 0:
            return
        self._struck.add(index)
        self._victims.add((target, incarnation))
        now = time.time()
        ends_at = now + fault.seconds if fault.kind == "freeze" else now
        fields = {"fault": fault.kind, "target": target, "incarnation": incarnation, "index": index}
        note("fault", **fields, struck_at=now, ends_at=ends_at, pid=victim.pid, node=victim.node_id)
        self._send(victim.node_id, victim.pid, SIGNALS[fault.kind])
        if fault.kind == "freeze":
            self._thaws.append((time.monotonic() + fault.seconds, victim.node_id, victim.pid))

    def _send(self, node_id: str, pid: int, number: signal.Signals) -> None:
        try:
            ray.get(send_signal(node_id, pid, number), timeout=SIGNAL_TIMEOUT_S)
        except (RayError, TimeoutError, ProcessLookupError) as error:
            _log.warning("signal %s to %s failed: %s", number.name, pid, error)


def _thaws(events: Sequence[dict[str, Any]]) -> list[tuple[float, str, int]]:
    """What the tape knows as frozen is thawed in time, also by a supervisor that was restarted meanwhile."""
    now, clock = time.time(), time.monotonic()
    frozen = [e for e in events if e["kind"] == "fault" and e.get("ends_at", 0.0) > now]
    return [(clock + event["ends_at"] - now, event["node"], event["pid"]) for event in frozen]
