"""The supervisor: holds the wanted actors against the cluster, from the start of a run to its last file.

Detached, and without state that it could not read back: names and placement groups from Ray, counters from the
syncer, struck faults from the tape. A restart of it goes on where it was. Decisions are made in `app.run`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from collections import deque
from typing import Any

import ray
from ray.exceptions import RayError

from actors.ending import conclude, final_evaluation, patience_of
from actors.evaluator import FinalResult
from actors.fleet import Fleet
from actors.lookout import Lookout, lasting
from actors.monitor import CALL_TIMEOUT_S, Monitor
from actors.roster import SCALED, Roster
from actors.service import Service
from actors.spec import EVALUATOR, LEDGER, RENDEZVOUS, SYNCER, RunSpec
from actors.strike import Striker
from actors.supervisor_status import SupervisorStatus
from actors.syncer_status import SyncerStatus
from actors.syncers import Syncers
from app.run import tape
from app.run.remote import patiently
from app.run.storage import open_store
from app.run.summary import read_summary
from app.run.watch import GiveUp, Lost, Replace, Watch

_log = logging.getLogger(__name__)

FAILURES = "failures"
"""Folder of the run in which the supervisor leaves its own unforeseen errors, a file each."""


class Supervisor:
    """One loop in one thread; calls only read what it found."""

    def __init__(self, spec: RunSpec, attempt: str):
        """`attempt` names this start of the run: the supervisor of an attempt that ended starts nothing again."""
        self._spec, self._attempt = spec, attempt
        self._fleet = Fleet(spec)
        self._lookout = Lookout(self._fleet, spec)
        self._monitor = Monitor(spec, self._fleet, self._lookout)
        self._syncers = Syncers(spec, self._fleet, self._lookout)
        self._striker = Striker(spec, self._fleet, self._lookout, self._monitor)
        config = spec.config
        self._lasting = lasting(config)
        self._roster = Roster(spec, self._fleet, self._lookout, self._monitor, attempt)
        self._scale: deque[tuple[str, int]] = deque()
        """What `scale` was told and the loop has not done yet."""
        self._watch = Watch(config.diloco, config.supervisor, time.monotonic())
        self._phase = "starting"
        self._error: str | None = None
        self._stop_reason: str | None = None
        self._stop_by = math.inf
        """When (monotonic clock) a stop no longer waits for a syncer that was never there."""
        self._final: FinalResult | None = None
        self._summary: dict[str, Any] | None = None
        self._fetched = threading.Event()
        threading.Thread(target=self._run, name="supervise", daemon=True).start()

    # ---- called by the driver

    def status(self) -> SupervisorStatus:
        """Where the run stands."""
        look = self._lookout
        return SupervisorStatus(
            attempt=self._attempt,
            phase=self._phase,
            syncer=look.syncer,
            syncer_silent_s=look.services[look.leader].silent_s,
            learners=dict(look.learners),
            silent=tuple(look.silent),
            present=self._roster.present,
            evaluation=self._monitor.evaluation,
            final=self._final,
            summary=self._summary,
            error=self._error,
        )

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def stop(self, reason: str) -> None:
        """End the run before its budget: last round, checkpoint, summary."""
        if self._stop_reason is None:
            self._stop_by = time.monotonic() + self._spec.config.supervisor.stop_deadline_s
            self._stop_reason = reason

    def scale(self, pool: str, most: int) -> None:
        """Let a pool have so many learners at most from now on. Raises ValueError."""
        self._roster.check(pool, most)
        self._scale.append((pool, most))

    def fetched(self) -> None:
        """The driver has the result: the supervisor may leave."""
        self._fetched.set()

    # ---- the loop

    def _run(self) -> None:
        try:
            if self._events("run_ended"):
                self._summary = patiently(lambda: read_summary(open_store(self._spec.location)))
            else:
                self._supervise()
        except Exception:
            self._error = traceback.format_exc()
            _log.exception("the supervisor failed")
            if self._count_failure(self._error) < self._spec.config.supervisor.most_failures:
                os._exit(1)  # Ray starts it anew, and it goes on where it was
            self._end("failed")
        self._leave()

    def _count_failure(self, error: str) -> int:
        """Unforeseen errors of this attempt by now: on disk, as neither this process nor the syncer may live on."""
        most = self._spec.config.supervisor.most_failures
        try:
            store = open_store(f"{self._spec.location}/{FAILURES}")
            count = len(store.names(self._attempt)) + 1
            store.write(f"{self._attempt}-{count}.txt", error.encode())
            return count
        except OSError:
            _log.exception("the failure can't be written down")
            return most

    def _events(self, kind: str) -> list[dict[str, Any]]:
        """Events of this attempt; other attempts of the run may be on the tape."""
        events = patiently(lambda: tape.read(self._spec.tape))[0]
        return [event for event in events if event["kind"] == kind and event["attempt"] == self._attempt]

    def _supervise(self) -> None:
        config = self._spec.config
        self._striker.recall()
        self._roster.recall(self._events(SCALED))
        self._monitor.open()
        known = any(self._fleet.find(name) is not None for name in self._spec.syncers)
        if not known:
            self._make_missing()
        if not self._events("run_started"):
            self._monitor.note(
                "run_started", attempt=self._attempt, run_id=self._spec.run_id, budget=config.train.tokens
            )
            if self._spec.rolled_back:
                self._monitor.note("rolled_back", cut=self._spec.cut)
        # After a restart of the supervisor the run may have ended meanwhile: look before starting anything.
        self._lookout.look(wait_s=CALL_TIMEOUT_S if known else 0.0)
        while (status := self._step()) is None:
            time.sleep(config.supervisor.poll_s)
        self._end(status)

    def _step(self) -> str | None:
        """One turn: hold the wanted actors against the cluster. Returns the run's status once it is known."""
        syncer = self._lookout.syncer
        if syncer is not None and syncer.ended is not None:
            return "completed" if syncer.ended == "budget" else "stopped"
        if syncer is None and time.monotonic() > self._stop_by:
            return "stopped"
        self._make_missing()
        if self._stop_reason is not None:
            self._monitor.call("finish", self._stop_reason, self._spec.config.supervisor.stop_deadline_s)
        self._lookout.look()
        errors = (self._lookout.errors[name] for name in self._lasting if name in self._lookout.errors)
        if error := self._syncers.failed() or next(errors, None):
            self._error = error
            return "failed"
        self._watch_services()
        self._syncers.part()
        if self._act():
            return "failed"
        if self._lookout.syncer is not None:
            self._phase = "running"
            self._striker.strike(self._lookout.syncer)
            self._monitor.progress(self._lookout.syncer)
        return None

    def _make_missing(self) -> None:
        self._syncers.make_missing()
        make = {LEDGER: self._fleet.ledger, RENDEZVOUS: self._fleet.rendezvous}
        for name in self._lasting:
            if name in self._lookout.missing:
                make[name]()
        while self._scale:
            self._roster.scale(*self._scale.popleft())
        if self._lookout.syncer is None or not self._lookout.syncer.finishing:
            self._roster.look()

    def _watch_services(self) -> None:
        """End a service that does not answer: merges, data or measurements wait for it.

        The syncer's next process claims a new epoch, so the old one can do no harm.
        """
        for name, service in self._lookout.services.items():
            if service.lost is not None:
                self._service_fault("died", service.lost, service.well_at)
                service.lost = None
            handle = self._fleet.find(name) if self._late(name, service) else None
            if handle is None:
                continue
            _log.warning("the %s is silent for %.0f s: ending it", name, service.silent_s)
            if service.starting:
                ray.kill(handle, no_restart=False)
            else:
                self._service_fault("hang", service.answer, service.well_at)
                self._fleet.end_process(service.answer.node_id, service.answer.pid, handle)
            self._lookout.restarting(name)

    def _late(self, name: str, service: Service) -> bool:
        config = self._spec.config
        hang_s = config.supervisor.evaluator_silent_s if name == EVALUATOR else config.diloco.hang_min_s
        return name not in self._lookout.missing and service.overdue(config.supervisor.start_deadline_s, hang_s)

    def _service_fault(self, reason: str, last: Any, well_at: float) -> None:
        """A fault that nobody injected. Only the syncer's incarnations are told apart, by the epochs that they led."""
        if isinstance(last, SyncerStatus) and not self._striker.struck(SYNCER, last.epoch):
            fields = {"fault": reason, "target": SYNCER, "incarnation": last.epoch, "id": None}
            self._monitor.note("fault", **fields, struck_at=time.time() - time.monotonic() + well_at)

    def _act(self) -> bool:
        """Carry out what the watch decides; True when the run has failed."""
        for action in self._watch.look(self._lookout.sights(), time.monotonic()):
            match action:
                case Lost(learner, incarnation, reason):
                    self._lost(learner, incarnation, reason)
                case Replace(learner, incarnation, reason):
                    self._lost(learner, incarnation, reason)
                    status = self._lookout.learners.get(learner)
                    handle = self._fleet.find(learner)
                    if status is not None and handle is not None:
                        self._fleet.end_process(status.node_id, status.pid, handle)
                    elif handle is not None:
                        ray.kill(handle, no_restart=False)
                case GiveUp(reason):
                    self._error = reason
                    return True
        return False

    def _lost(self, learner: str, incarnation: int, reason: str) -> None:
        if incarnation > 0 and not self._striker.struck(learner, incarnation):
            fields = {"fault": reason, "target": learner, "incarnation": incarnation, "id": None}
            self._monitor.note("fault", **fields, struck_at=self._last_well(learner, incarnation, reason))
        self._monitor.tell("lost", learner, incarnation, reason)

    def _last_well(self, learner: str, incarnation: int, reason: str) -> float:
        """When the fault struck, Unix time, as far as was seen: a hang began after a step, a death after an answer."""
        at, status = self._lookout.seen.get(learner, (time.time(), None))
        if status is None or status.incarnation != incarnation:
            return time.time()
        return at if reason == "died" else status.stepped_at or at

    # ---- the end

    def _end(self, status: str) -> None:
        """Evaluate and export, and write the summary."""
        self._phase = "ending"
        try:
            self._striker.calm()
            self._lookout.look(wait_s=CALL_TIMEOUT_S)
            if self._lookout.syncer is not None:
                self._monitor.sample(self._lookout.syncer)
            self._fleet.end_learners()
            if status == "completed":
                status = self._finish()
            self._monitor.call("conclude")
            self._summary = conclude(self._spec, status, self._lookout.syncer, self._final)
            self._monitor.note("run_ended", attempt=self._attempt, status=status)
            patiently(lambda: tape.assemble(self._spec.tape), patience_of(self._spec, status))
        except Exception:
            self._error = f"{self._error or ''}\n{traceback.format_exc()}".strip()
            _log.exception("the run could not be concluded")

    def _leave(self) -> None:
        """Leave nothing behind in the cluster, this actor least of all."""
        try:
            self._fleet.end_learners()
            self._fleet.end_services(self._lookout.leader)
            self._monitor.finish(self._summary or {})
        except Exception:
            _log.exception("something may be left in the cluster")
        self._phase = "done"
        self._fetched.wait(self._spec.config.supervisor.linger_s)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _finish(self) -> str:
        """The final evaluation and `model/`. Returns the run's status."""
        try:
            self._final = final_evaluation(
                self._spec, self._fleet, self._lookout, self._watch_services, lambda: self._stop_reason is not None
            )
        except (RayError, TimeoutError) as error:
            self._error = f"final evaluation: {error}"
            return "failed"
        if self._final is None:
            return "stopped"  # the checkpoint has everything: the same command with run.resume=auto goes on here
        last = self._final.last
        self._monitor.note("final", tokens=last.tokens, loss=last.result.loss, first=self._final.first.loss)
        return "completed"
