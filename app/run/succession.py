"""When the syncer that follows takes over from the one that leads. Pure: times are passed in.

Taking over is safe whenever it happens, as the journal fences the other one off; this only decides when it is worth
the merges that it costs.
"""

from __future__ import annotations

from enum import Enum


class Seat(Enum):
    """What one look at the other syncer showed."""

    LEADS = "leads"
    """It leads, or is about to: it claims or has claimed an epoch. It may fall SILENT or be GONE next."""
    FOLLOWS = "follows"
    """It is well and waits for somebody to lead, as this one does."""
    SILENT = "silent"
    """It has not answered yet. What it was before is not known any more."""
    GONE = "gone"
    """Its process is not there; Ray may start another, which follows."""
    NOBODY = "nobody"
    """There is no such actor."""


class Succession:
    """One follower's patience. All times in seconds of one monotonic clock."""

    def __init__(self, after_s: float, now: float):
        self._after_s = after_s
        self.sign_at = now
        """Newest sign of somebody who leads."""
        self.heard = False
        """Whether the other one was ever heard to lead."""
        self._looked_at = now
        self._led = False
        """The other one led when it answered last."""

    def due(self, seat: Seat, written: bool, now: float) -> bool:
        """Take a look, and say whether to take over now. `written`: the journal has grown since the last look."""
        self._forgive(now)
        if seat is Seat.LEADS or written:  # who writes leads, whatever the network makes of it
            self.sign_at = now
        if seat in (Seat.LEADS, Seat.FOLLOWS):
            self._led = seat is Seat.LEADS
            self.heard |= self._led
        if written:
            return False
        if seat is Seat.NOBODY or (seat is Seat.GONE and self._led):
            return True
        return now - self.sign_at > self._after_s

    def _forgive(self, now: float) -> None:
        """Nobody is silent while nobody looks: this process itself may have stood still."""
        unseen = now - self._looked_at - self._after_s / 2
        self._looked_at = now
        if unseen > 0:
            self.sign_at += unseen
