"""The inner steps of a learner as others are told of them. Written by the training thread, read by any."""

from __future__ import annotations

import statistics
import time
from collections import deque

from app.config import Config
from app.diloco.clock import hang_deadline

RECENT_STEPS = 16
GROUP_SHARE = 0.8
"""Share of the hang deadline for which ranks wait for each other: they know better than the supervisor who is late."""


class Strides:
    """How many, how long, and with which loss."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self.newest = (0, 0.0)
        """Inner steps made, and the Unix time of the last one's end; replaced as one."""
        self.loss = float("nan")

    def made(self, steps: int, seconds: float, loss: float) -> None:
        """One more step, of so many by now, is made."""
        self._times.append(seconds)
        self.newest = (steps, time.time())
        self.loss = loss

    @property
    def step_time(self) -> float:
        """Median seconds of recent inner steps; 0 before there is one."""
        times = list(self._times)
        return statistics.median(times) if times else 0.0

    def pace(self) -> tuple[float, float]:
        """Step time and loss."""
        return self.step_time, self.loss

    def patience_s(self, config: Config) -> float:
        """For how long ranks of a group wait for each other: less than a learner may be silent."""
        step_time = self.step_time
        if step_time == 0:
            return config.supervisor.start_deadline_s
        return GROUP_SHARE * hang_deadline(step_time, config.diloco.hang_min_s, config.diloco.hang_steps, stretch=1.0)
