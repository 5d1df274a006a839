"""Real faults, done by tasks on the node of their victim: signals, a slow clock, a lost node, a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Sequence
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


@ray.remote(num_cpus=0, max_retries=0)
def _signal(pid: int, number: int) -> None:
    os.kill(pid, number)


@ray.remote(num_cpus=0, max_retries=0)
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


@ray.remote(num_cpus=0, max_retries=0)
def _kill_raylet() -> None:
    os.kill(int(os.environ[RAYLET]), signal.SIGKILL)


@ray.remote(num_cpus=0, max_retries=0)
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


def _there(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def send_signal(node_id: str, pid: int, number: signal.Signals) -> Any:
    """Send a signal to a process on that node. Returns the reference of the task that does it, as all of these do."""
    return _signal.options(scheduling_strategy=_there(node_id)).remote(pid, int(number))


def slow_down(node_id: str, pid: int, factor: float, seconds: float) -> Any:
    """Let a process run for one part in `factor` of the time only, for so many seconds."""
    return _slow.options(scheduling_strategy=_there(node_id)).remote(pid, factor, seconds)


def kill_node(node_id: str) -> Any:
    """End the node's raylet, and with it all on the node."""
    return _kill_raylet.options(scheduling_strategy=_there(node_id)).remote()


def fill_disk(node_id: str, folder: str, pids: Sequence[int], full: bool) -> Any:
    """Let these processes of that node write nothing to the folder any more, or again."""
    return _fill_disk.options(scheduling_strategy=_there(node_id)).remote(folder, pids, full)
