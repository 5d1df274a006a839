"""Real faults, done on the node of their victim: signals, a slow clock, a lost node, a full disk.

On the caller's own node at once, on others by a task there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.preload import RAYLET

PERIOD_S = 0.1
"""Within it a slowed process runs once and is stopped once."""
SMALL_DISK = 1 << 30
"""A file system up to this size is filled up; on a larger one processes are kept from writing files instead."""
BALLOON = ".balloon"
BALLOON_BYTES = 1 << 20
TASK_S = 10.0
"""A task on another node is waited for so long."""


def send_signal(node_id: str, pid: int, number: signal.Signals) -> None:
    """Send a signal to a process. Raises ProcessLookupError, RayError or TimeoutError, as all of these may."""
    _there(node_id, os.kill, pid, int(number))


def slow_down(node_id: str, pid: int, factor: float, seconds: float) -> None:
    """From now on let a process run for one part in `factor` of the time only, for so many seconds."""
    _there(node_id, _slow_in_background, pid, factor, seconds, wait=False)


def kill_node(node_id: str) -> None:
    """End another node's raylet, and with it all on that node."""
    _there(node_id, _kill_raylet, wait=False)


def fill_disk(node_id: str, folder: str, pids: Sequence[int], full: bool) -> None:
    """Let these processes of that node write nothing to the folder any more, or again."""
    _there(node_id, _fill_disk, folder, pids, full)


def _there(node_id: str, do: Callable[..., None], *args: Any, wait: bool = True) -> None:
    if node_id == ray.get_runtime_context().get_node_id():
        do(*args)
        return
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(do).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(*args)
    if wait:
        ray.get(task, timeout=TASK_S)


def _slow_in_background(pid: int, factor: float, seconds: float) -> None:
    threading.Thread(target=_slow, args=(pid, factor, seconds), daemon=True).start()


def _slow(pid: int, factor: float, seconds: float) -> None:
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        try:
            while time.monotonic() < end:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(PERIOD_S * (1 - 1 / factor))
                os.kill(pid, signal.SIGCONT)
                time.sleep(PERIOD_S / factor)
        finally:
            os.kill(pid, signal.SIGCONT)


def _kill_raylet() -> None:
    os.kill(int(os.environ[RAYLET]), signal.SIGKILL)


def _fill_disk(folder: str, pids: Sequence[int], full: bool) -> None:
    disk = os.statvfs(folder)
    if disk.f_blocks * disk.f_frsize > SMALL_DISK:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))
        return
    balloon = Path(folder) / BALLOON
    if not full:
        balloon.unlink(missing_ok=True)
        return
    with balloon.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * BALLOON_BYTES)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
