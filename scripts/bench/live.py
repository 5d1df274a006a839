"""A run that lives in the Ray of this process: its actors, and their end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
import ray

from actors.spec import RunSpec
from below import below

T = TypeVar("T")
START_S = 120.0
CALL_S = 10.0
POLL_S = 0.05
END_S = 15.0


def wait(what: str, look: Callable[[], T | None]) -> T:
    """The first thing that `look` finds. Raises TimeoutError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(POLL_S)
    raise TimeoutError(f"waited {START_S:.0f} s: {what}")


def find(name: str, spec: RunSpec) -> Any:
    """The handle of an actor of the run, once there is one."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return ray.get_actor(name, namespace=spec.namespace)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """End the run's Ray and wait for every process below this one, also for those that are stopped."""
    try:
        yield
    finally:
        started = below()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        ray.shutdown()
        for process in psutil.wait_procs(started, timeout=END_S)[1]:
            process.kill()
