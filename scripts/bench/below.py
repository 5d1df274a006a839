"""Processes below one, those included that a raylet below it has had forked (`actors/preload.py`)."""

from __future__ import annotations

import contextlib

import psutil

from actors.preload import RAYLET


def below(root: int | None = None) -> list[psutil.Process]:
    """All processes below `root`, by default this one."""
    found = psutil.Process(root).children(recursive=True)
    pids = {process.pid for process in found}
    return found + [p for p in psutil.process_iter() if p.pid not in pids and raylet_of(p) in pids]


def raylet_of(process: psutil.Process) -> int | None:
    """The raylet that started a process, at some remove."""
    with contextlib.suppress(psutil.Error, ValueError):
        return int(process.environ().get(RAYLET, ""))
    return None
