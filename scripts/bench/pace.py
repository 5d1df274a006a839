"""How fast a process makes steps while it has a core to itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray

from actors.learner import LearnerStatus
from actors.spec import RunSpec
from live import CALL_S, POLL_S, START_S, find

WARM_STEPS = 30
SETTLE_S = 0.3
"""The first moments after a SIGCONT do not count: caches are cold, and what piled up meanwhile is dealt with."""


@dataclass(frozen=True)
class Pace:
    """How fast a process was in one window."""

    per_s: float
    """Steps a second."""
    per_cpu_s: float
    """Steps a second of its CPU time, all threads together."""


@dataclass(frozen=True)
class Runner:
    """A process that makes steps, and how to read its counter."""

    pid: int
    stepped: Callable[[], tuple[int, float]]
    """Steps made, and the Unix time of the last one's end: asked seldom, as answering costs the process."""

    @contextlib.contextmanager
    def running(self, core: int) -> Iterator[None]:
        """Let it run, all its threads on this core."""
        pin(self.pid, core)
        os.kill(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGSTOP)

    def pace(self, seconds: float) -> Pace:
        """Whole steps, over about `seconds`."""
        time.sleep(SETTLE_S)
        first, start = self.stepped()
        cpu_start, began = self._cpu_s(), time.monotonic()
        time.sleep(seconds)
        share = (self._cpu_s() - cpu_start) / (time.monotonic() - began)
        last, end = self.stepped()
        per_s = (last - first) / (end - start)
        return Pace(per_s, per_s / share)

    def warm_up(self) -> None:
        """Wait until it makes steps at its usual pace."""
        deadline = time.monotonic() + START_S
        while self.stepped()[0] < WARM_STEPS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not make {WARM_STEPS} steps in {START_S} s")
            time.sleep(POLL_S)

    def _cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        return sum(int((t / "schedstat").read_text().split()[0]) for t in threads(self.pid)) / 1e9


def threads(pid: int) -> list[Path]:
    """A folder of /proc for each thread of a process."""
    return list(Path(f"/proc/{pid}/task").iterdir())


def pin(pid: int, core: int) -> None:
    """Put every thread of a process on one core."""
    for thread in threads(pid):
        with contextlib.suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(thread.name), {core})


def of_learner(learner: str, spec: RunSpec) -> Runner:
    """A learner of a run, once it has a process."""
    actor = find(learner, spec)
    pid = ray.get(actor.pid.remote(), timeout=START_S)

    def stepped() -> tuple[int, float]:
        status: LearnerStatus = ray.get(actor.status.remote(), timeout=CALL_S)
        return status.steps, status.stepped_at

    return Runner(pid, stepped)
