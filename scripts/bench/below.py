"""Processes below one, and those that something has marked: forks of a preloader have another parent
(`actors/preload.py`), but the environment of whoever asked for them.
"""

from __future__ import annotations

import contextlib

import psutil

from actors.preload import RAYLET


def below(root: int | None = None) -> list[psutil.Process]:
    """All processes below `root`, by default this one, those included that a raylet below it has had forked."""
    found = psutil.Process(root).children(recursive=True)
    pids = {process.pid for process in found}
    return found + [p for p in psutil.process_iter() if p.pid not in pids and raylet_of(p) in pids]


def raylet_of(process: psutil.Process) -> int | None:
    """The raylet that started a process, at some remove."""
    raylet = _variable(process, RAYLET)
    return int(raylet) if raylet.isdecimal() else None


def marked(name: str, value: str) -> list[psutil.Process]:
    """All living processes that began with this variable in their environment."""
    return [process for process in psutil.process_iter() if _variable(process, name) == value and not gone(process)]


def _variable(process: psutil.Process, name: str) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.environ().get(name, ""))
    return ""


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return True
