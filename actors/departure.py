"""When a learner has to be gone."""

from __future__ import annotations

import os
import threading
import time

LEFT_S = 1.0
"""A process that is to end does so at most this long after its learner had to be gone."""


class Departure:
    """Until when a learner may hand in, and whether its process ends then."""

    def __init__(self) -> None:
        self.by: float | None = None
        """When (monotonic clock) it is gone, handed in or not; None while it is to stay."""
        self._exits = False

    def set(self, seconds: float, exits: bool) -> None:
        """It has so many seconds at most; told twice, the earlier end counts. `exits`: its process ends, too."""
        by = time.monotonic() + seconds
        self.by = by if self.by is None else min(self.by, by)
        if exits and not self._exits:
            self._exits = True
            end = threading.Timer(seconds + LEFT_S, os._exit, [0])  # where it is held up before it gets to step
            end.daemon = True
            end.start()

    def go(self) -> None:
        """It is gone: end the process if that was asked for."""
        if self._exits:
            os._exit(0)
