"""One service of a run (syncer, ledger, evaluator) as the supervisor sees it: who answered last, and when."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import ray


@dataclass(frozen=True)
class Whereabouts:
    """Where an actor's process is; a service answers with this, or with something that has both fields."""

    node_id: str
    pid: int
    error: str | None = None
    """Why it can't do its work, and never will."""


def whereabouts(error: str | None = None) -> Whereabouts:
    """Those of the calling actor."""
    return Whereabouts(ray.get_runtime_context().get_node_id(), os.getpid(), error)


@dataclass
class Service:
    """Times are of the monotonic clock."""

    answer: Any = None
    """The newest one; None before the first. It stays when its process is gone."""
    starting: bool = True
    """The process has not answered yet."""
    lost: Any = None
    """The last answer of a process that was found to be gone, until somebody takes note of it."""
    heard: float = field(default_factory=time.monotonic)
    """When it answered, or was found, made or ended."""
    well_at: float = field(default_factory=time.monotonic)
    """It was well then or later: when what it answered last was asked. What struck it did so after that."""

    @property
    def silent_s(self) -> float:
        """Seconds since it answered, or since its process was found, made or ended."""
        return time.monotonic() - self.heard

    def answered(self, answer: Any, asked_at: float) -> None:
        """It is well, as it answers what was asked then."""
        self.answer, self.starting, self.heard, self.well_at = answer, False, time.monotonic(), asked_at

    def gone(self) -> None:
        """Its process is not there. Found again and again while the next one starts."""
        if not self.starting:
            self.lost = self.answer
            self.restart()

    def restart(self) -> None:
        """From now on the next process is awaited, for as long as a start may take."""
        self.starting, self.heard = True, time.monotonic()

    def overdue(self, start_deadline_s: float, hang_s: float) -> bool:
        """Whether it is silent for too long: its start hangs, or it does."""
        return self.silent_s > (start_deadline_s if self.starting else hang_s)
