"""The event tape, one JSON object per event, written by one process at a time.

A tape is named by its path, `<run.dir>/events.jsonl`, or by the same URL in a store that can't append: there it lies in
segments (`segments.py`), and the file itself is put together at the run's end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.run.lines import parsed
from app.run.remote import patiently
from app.run.segments import SegmentFollower, Segments, SegmentTape, send_left_behind
from app.run.storage import local_path
from app.run.tape_file import FileFollower, Tape

__all__ = ["Follower", "SegmentTape", "Tape", "assemble", "open_tape", "read", "recover"]


def recover(location: str, spool: Path) -> None:
    """Have everything on the tape that syncers before this one wrote on this machine. A store that is away is waited
    for; a path needs nothing."""
    if local_path(location) is None:
        patiently(lambda: send_left_behind(Segments(location), spool))


def open_tape(location: str, epoch: int, spool: Path) -> Tape | SegmentTape:
    """The tape at a path or URL, for the syncer of this epoch. `spool`: a folder of this machine for what a store does
    not have yet; not used for a path."""
    path = local_path(location)
    return SegmentTape(Segments(location), epoch, spool) if path is None else Tape(path)


class Follower:
    """Reads what is added to a tape, each event once."""

    def __init__(self, location: str | Path) -> None:
        """Start at the tape's present end; it may not exist yet."""
        path = local_path(str(location))
        self._from = SegmentFollower(Segments(str(location))) if path is None else FileFollower(path)

    def fresh(self) -> list[dict[str, Any]]:
        """Events that were completed since the last call."""
        return self._from.fresh()


def read(location: str | Path) -> tuple[list[dict[str, Any]], int]:
    """All whole events of a tape (none where there is no tape yet), oldest first, and the number of torn lines."""
    path = local_path(str(location))
    if path is None:
        return parsed(Segments(str(location)).joined())
    return parsed(path.read_bytes()) if path.exists() else ([], 0)


def assemble(location: str) -> None:
    """Have the tape as one file too, where it lies in segments."""
    if local_path(location) is None:
        Segments(location).assemble()
