"""A learner: one Ray actor that holds its group's rank 0, and owns the actors of the others (`crew.py`).

Heavy imports wait until the process is up, so that their share of a recovery can be told.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.learning.memory import keep_freed_memory

if TYPE_CHECKING:
    from actors.service import Whereabouts
    from actors.spec import RunSpec
    from app.diloco.messages import Payload


HANG_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class LearnerStatus:
    """What the supervisor sees of a learner."""

    learner: str
    incarnation: int
    """0 before it joined."""
    pid: int
    node_id: str
    """Of rank 0."""
    state: str
    steps: int
    stepped_at: float
    """Unix time of the end of the last inner step; 0 before there is one."""
    tokens: int
    step_time: float
    """Median seconds of recent inner steps; 0 before there is one."""
    loss: float
    error: str | None
    timeline: dict[str, float] = field(default_factory=dict)
    ranks: tuple[Whereabouts, ...] = ()
    """Where ranks 1 to W−1 are, once they are up."""


class Learner:
    """Starts its worker and answers for it. Training runs in the worker's own threads."""

    def __init__(self, spec: RunSpec, learner: str):
        # A learner that hangs can't tell why: on this signal its threads' stacks go to its log in Ray's session folder.
        faulthandler.register(HANG_SIGNAL, all_threads=True)
        keep_freed_memory()  # before the threads that it is for
        timeline = {"actor": time.time()}
        from actors.rank import start_ranks

        ranks = start_ranks(spec, learner)  # they import while this process does
        from actors.worker import Worker

        timeline["imported"] = time.time()
        self._worker = Worker(spec, learner, timeline, ranks)
        hand_in_s = spec.config.elastic.hand_in_s
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._worker.leave(hand_in_s, exits=True))
        self._worker.start()

    def status(self) -> LearnerStatus:
        """Counters and state now; never waits for a step."""
        return self._worker.status()

    def leave(self, seconds: float) -> None:
        """Hand in what it has in so many seconds at most; whoever asked ends it when its status says `left`."""
        self._worker.leave(seconds)

    def moments(self) -> Payload | None:
        """A recent copy of its optimizer state (`app.learning.moments`), uint8 [bytes]; never waits for a step."""
        return self._worker.moments()

    def mute(self, seconds: float) -> None:
        """A fault: its messages to and from the syncer are lost for so long."""
        self._worker.sabotage.mute(seconds)

    def corrupt(self, how: str, seconds: float) -> None:
        """A fault: its contributions are garbage for so long."""
        self._worker.sabotage.corrupt(how, seconds)

    def pid(self) -> int:
        """Process id, for faults and their checks."""
        return os.getpid()
