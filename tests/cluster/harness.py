"""Starts real runs of a tiny model on the test cluster, and waits on conditions with deadlines."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayError

from actors.driver import prepare_run
from actors.fleet import Fleet
from actors.spec import EVALUATOR, LEDGER, SUPERVISOR, RunSpec
from actors.start import attach, dismiss, find_supervisor, start_supervisor, status_of, wait_until_left, went_back
from app.config import load
from app.run import tape
from app.run.folder import open_folder
from below import gone
from tests.small import SMALL

T = TypeVar("T")

TINY = [
    *SMALL,
    "data.eval_samples=4",
    "train.warmup_tokens=100",
    "train.tokens=1000000000",
    "eval.every_tokens=1000000000",
    "eval.sample_tokens=8",
    "checkpoint.snapshot_every_merges=16",
    "supervisor.poll_s=0.2",
    "supervisor.sample_every_s=0.5",
    "supervisor.linger_s=2",
    # a tiny model steps in milliseconds: rounds a few times a second, so that two cores can keep up
    "diloco.sync_interval=100",
    "diloco.overlap_steps=20",
]
DEADLINE_S = 90.0


def wait_for(what: str, look: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
    """The first truthy thing that `look` returns; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {deadline_s:.0f} s for: {what}")


class LiveRun:
    """A run, started as the driver starts it."""

    def __init__(self, folder: Path, overrides: list[str]):
        self.config = load([*TINY, f"run.dir={folder}", *overrides])
        self.folder = open_folder(self.config)
        self.spec: RunSpec = went_back(prepare_run(self.config, self.folder), self.folder)
        self.supervisor = attach(self.spec.run_id) or start_supervisor(self.spec)

    def actor(self, name: str) -> Any:
        return ray.get_actor(name, namespace=self.spec.namespace)

    def call(self, name: str, method: str, *args: Any, timeout: float = 20.0) -> Any:
        return ray.get(getattr(self.actor(name), method).remote(*args), timeout=timeout)

    def try_call(self, name: str, method: str, *args: Any) -> Any:
        try:
            return self.call(name, method, *args, timeout=5.0)
        except (RayError, ValueError, TimeoutError):
            return None

    def status(self, name: str) -> Any:
        return self.try_call(name, "status")

    def leading(self) -> Any:
        """The status of the syncer that leads; None when none answers that it does."""
        answers = [self.status(name) for name in self.spec.syncers]
        return max((s for s in answers if hasattr(s, "epoch")), key=lambda s: s.epoch, default=None)

    def syncer(self) -> Any:
        return wait_for("a syncer leads", self.leading)

    def learner(self, name: str) -> Any:
        return wait_for(f"{name} has joined", lambda: (s := self.status(name)) and s.incarnation and s)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in tape.read(self.spec.tape)[0] if event["kind"] == kind]

    def wait_training(self) -> None:
        """Every learner has stepped, and its work was merged."""
        for name in self.config.learner_ids:
            incarnation = self.learner(name).incarnation
            wait_for(
                f"a merge holds work of {name}#{incarnation}",
                lambda name=name, incarnation=incarnation: self.merged_since(0, name, incarnation),
            )

    def merged_since(self, at: float, learner: str, incarnation: int) -> list[dict[str, Any]]:
        return [
            merge
            for merge in self.events("merge")
            if merge["at"] >= at
            and any(c["learner"] == learner and c["incarnation"] == incarnation for c in merge["contains"])
        ]

    def versions(self) -> tuple[int, ...]:
        return self.syncer().versions

    def wait_merges(self, more: int) -> None:
        """That many more merges."""
        before = sum(self.versions())
        wait_for(f"{more} more merges", lambda: (s := self.leading()) and sum(s.versions) >= before + more)

    def steps_until(self, over: Callable[[], float | None], *names: str) -> dict[str, int]:
        """How many more steps these learners, or all, are seen to make before `over()`, the time of something."""
        first = {name: self.learner(name).steps for name in names or self.config.learner_ids}
        seen = []

        def look() -> float | None:
            seen.extend(status for name in first if (status := self.status(name)))
            return over()

        end = wait_for("it is over", look)
        return {
            name: max([s.steps - n for s in seen if s.learner == name and s.stepped_at < end])
            for name, n in first.items()
        }

    def pids(self) -> list[int]:
        names = (*self.config.learner_ids, *self.spec.syncers, SUPERVISOR, EVALUATOR, LEDGER)
        found = [self.try_call(name, "pid") for name in names]
        return [pid for pid in found if pid]

    def finish(self) -> dict[str, Any]:
        """Stop the run and return its summary; nothing of it is left in the cluster."""
        if (supervisor := find_supervisor(self.spec.run_id)) is not None:
            supervisor.stop.remote("test")
        return self.wait_done()

    def wait_done(self) -> dict[str, Any]:
        def done() -> Any:
            found = find_supervisor(self.spec.run_id)
            status = status_of(found, 5.0) if found is not None else None
            return status if status is not None and status.phase == "done" else None

        status = wait_for("the run has ended", done)
        dismiss(find_supervisor(self.spec.run_id))
        wait_until_left(self.spec.run_id)
        assert status.summary is not None, status.error
        return status.summary

    def close(self) -> None:
        """End whatever is left; for the end of a test that may have failed."""
        if (supervisor := find_supervisor(self.spec.run_id)) is not None:
            ray.kill(supervisor, no_restart=True)  # before those that it would start anew
        Fleet(self.spec).end_learners()
        Fleet(self.spec).end_services()
        if self.folder.lock is not None:
            self.folder.lock.release()


def kill(pid: int) -> None:
    """A real SIGKILL, and the process is seen to be gone."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(f"process {pid} is gone", lambda: gone(process))
