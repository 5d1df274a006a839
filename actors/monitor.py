"""What a run tells about itself while it goes on: events for the tape, samples of all counters, evaluations, tracking.

The syncer alone writes the tape; what it can't take while it is away waits here and is sent again.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from actors.evaluator import Evaluation
from actors.fleet import Fleet
from actors.lookout import Lookout
from actors.spec import RunSpec
from actors.syncer_status import SyncerStatus
from app.run.storage import open_store
from app.run.tracking import NoTracker, Tracker, open_tracker

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
TELL_TIMEOUT_S = 1.0
"""For what need not arrive now: watching the learners must not wait for a syncer that is being restarted."""


class Monitor:
    """One run's voice."""

    def __init__(self, spec: RunSpec, fleet: Fleet, lookout: Lookout):
        self._spec, self._fleet, self._lookout = spec, fleet, lookout
        self._tracker: Tracker = NoTracker()
        self._backlog: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._deaf_until = 0.0
        """When (monotonic clock) the syncer is told the next thing, after it did not answer."""
        self._evaluating: tuple[Any, float] | None = None
        """The measurement under way, and until when (monotonic clock) it is waited for."""
        config = spec.config
        self._next_eval = 0.0 if config.eval.every_tokens < config.train.tokens else math.inf
        self._next_sample = 0.0
        self.evaluation: Evaluation | None = None
        """The newest one."""

    def open(self) -> None:
        """Open the tracker, which may take its time or fail: not while the actor is being made."""
        self._guarded(self._open_tracker)

    def note(self, kind: str, **fields: Any) -> None:
        """Put an event on the tape, now or once the syncer is back; it may come twice."""
        self.tell("note", kind, {"at": time.time(), **fields})

    @property
    def behind(self) -> bool:
        """Whether there is something that the syncer has not been told yet."""
        return bool(self._backlog)

    def tell(self, method: str, *args: Any) -> None:
        """Call the syncer now or once it is back, in order; it may be called twice."""
        self._backlog.append((method, args))
        while self._backlog and time.monotonic() >= self._deaf_until:
            if self.call(self._backlog[0][0], *self._backlog[0][1], timeout_s=TELL_TIMEOUT_S):
                self._backlog.popleft()
            else:
                self._deaf_until = time.monotonic() + TELL_TIMEOUT_S

    def call(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Call the syncer; False when it is away. One that was silent at the last look is not waited for."""
        leader = self._lookout.leader
        syncer = None if leader in self._lookout.silent else self._fleet.find(leader)
        if syncer is None:
            return False
        try:
            ray.get(getattr(syncer, method).remote(*args), timeout=timeout_s)
        except (RayError, TimeoutError) as error:
            _log.info("syncer.%s: %s", method, error)
            return False
        return True

    def progress(self, syncer: SyncerStatus) -> None:
        """Sample and evaluate when it is time to."""
        self._evaluate(syncer)
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + self._spec.config.supervisor.sample_every_s
            self.sample(syncer)

    def sample(self, syncer: SyncerStatus) -> None:
        """One sample of all counters for the tape and the tracker."""
        losses = []
        for learner, status in self._lookout.learners.items():
            if status.incarnation and learner not in self._lookout.silent:
                fields = {"incarnation": status.incarnation, "steps": status.steps, "tokens": status.tokens}
                self.note("learner", learner=learner, **fields, step_time=status.step_time, loss=status.loss)
                losses.append(status.loss)
        self.note("syncer", **_sample_of(syncer))
        if losses:
            figures = {"train/loss": sum(losses) / len(losses), "merges": syncer.merges, "live": syncer.live}
            self._guarded(lambda: self._tracker.log(syncer.tokens, figures))

    def finish(self, summary: dict[str, Any]) -> None:
        """The run's last figures go to the tracker."""
        self._guarded(lambda: self._tracker.finish(summary))
        if not self._spec.is_local:
            self._guarded(self._keep_tracking)

    def _open_tracker(self) -> None:
        self._tracker = open_tracker(self._spec.config, self._spec.run_id, self._spec.work_dir)

    def _keep_tracking(self) -> None:
        """Put the tracker's files beside those of starts before this one."""
        store, folder = open_store(self._spec.location), self._spec.work_dir
        for path in sorted((folder / "wandb").rglob("*")):
            if path.is_file() and not path.is_symlink():
                store.put(path.relative_to(folder).as_posix(), path)

    def _guarded(self, call: Callable[[], None]) -> None:
        """A tracker that fails costs its figures, never the run; the tape has them all."""
        try:
            call()
        except Exception as error:
            _log.exception("tracking is off from here on")
            self._tracker = NoTracker()
            self.note("tracking_failed", error=str(error))

    def _evaluate(self, syncer: SyncerStatus) -> None:
        if self._evaluating is not None:
            self._collect(*self._evaluating)
        elif syncer.tokens > 0 and syncer.tokens >= self._next_eval:  # learners start first, they share its cores
            every = self._spec.config.eval.every_tokens
            self._next_eval = (syncer.tokens // every + 1) * every
            until = time.monotonic() + self._spec.config.supervisor.evaluation_deadline_s
            self._evaluating = (self._fleet.evaluator().evaluate.remote(), until)

    def _collect(self, work: Any, until: float) -> None:
        """Take a measurement that is done. A process that hangs is ended by the supervisor, so its work ends too."""
        if not ray.wait([work], timeout=0)[0]:
            if time.monotonic() > until:
                _log.warning("an evaluation takes too long: ending it")
                ray.kill(self._fleet.evaluator(), no_restart=False)
            return
        try:
            found: Evaluation = ray.get(work)
            result = found.result
            self.evaluation = found
            self.note("eval", tokens=found.tokens, loss=result.loss, bits_per_byte=result.bits_per_byte)
            figures = {"eval/loss": result.loss, "eval/bits_per_byte": result.bits_per_byte}
            self._guarded(lambda: self._tracker.log(found.tokens, figures))
        except RayError as error:
            _log.warning("evaluation failed: %s", error)
        self._evaluating = None


def _sample_of(syncer: SyncerStatus) -> dict[str, Any]:
    names = ("epoch", "clock", "tokens", "merges", "live", "paused", "cpu_s", "merge_s", "traffic", "balance")
    return {name: getattr(syncer, name) for name in names}
