"""How long a blocking learner waits: a run must not stand still for ever for a merge that never comes."""

from __future__ import annotations

from collections.abc import Sequence

from app.diloco.blocking import waits_for
from app.diloco.settings import DilocoSettings


class SlotWait:
    """What one learner waits for, and since when."""

    def __init__(self, settings: DilocoSettings, joined_at: int):
        """`joined_at`: the clock at which the learner joined."""
        self._settings, self._joined_at = settings, joined_at
        self._given_up = [0] * settings.fragments
        """Fragment → clock up to which nothing is waited for any more."""
        self._waiting: tuple[int, float] | None = None
        """Fragment, and the time at which the wait for it began."""

    def holds(self, clock: int, versions_clock: Sequence[int], now: float) -> bool:
        """Whether the learner must not step yet, at time `now` (seconds).

        The arguments are those of `waits_for`. A merge that is not there after `round_deadline_s` is not waited for any
        longer: its round was given up, or never opened as merges were paused.
        """
        settings = self._settings
        while True:
            known = [max(pair) for pair in zip(versions_clock, self._given_up, strict=True)]
            p = waits_for(clock, known, settings, self._joined_at)
            if p is None:
                self._waiting = None
                return False
            if self._waiting is None or self._waiting[0] != p:
                self._waiting = (p, now)
            if now - self._waiting[1] < settings.round_deadline_s:
                return True
            self._given_up[p] = clock
