"""Between two steps: where other threads have the training thread do what must not happen within one."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
POLL_S = 0.02


class _Task:
    """Something that is waited for."""

    def __init__(self, do: Callable[[], Any]):
        self.do, self.done, self.given_up, self.result = do, threading.Event(), False, None


class Boundary:
    """Any thread may ask, the training thread serves."""

    def __init__(self, alive: Callable[[], bool]):
        """`alive`: whether the training thread runs."""
        self._alive = alive
        self.beat: Callable[[], None] = lambda: None
        """Called whenever the training thread serves."""
        self._tasks: deque[_Task] = deque()

    def run(self, do: Callable[[], T], timeout_s: float = math.inf) -> T | None:
        """What `do` returns, which the training thread calls; None when that has ended, or not got to it in time."""
        task = _Task(do)
        self._tasks.append(task)
        deadline = time.monotonic() + timeout_s
        while not task.done.wait(POLL_S):
            if not self._alive() or time.monotonic() > deadline:
                task.given_up = True
                return None
        return task.result

    def serve(self) -> None:
        """Do what is waited for; in the training thread, between two steps."""
        while self._tasks:
            task = self._tasks.popleft()
            if not task.given_up:
                task.result = task.do()
                task.done.set()
        self.beat()

    def pause(self, seconds: float, stop: threading.Event) -> None:
        """Serve for so long, or until told to stop; in the training thread, between two steps."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not stop.is_set():
            self.serve()
            stop.wait(min(left, POLL_S))
