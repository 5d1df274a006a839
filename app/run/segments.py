"""A tape in a store that can't append: numbered objects beside the place of the one file that the tape will be.

    events/<epoch>-<number>.jsonl    whole lines; the last one of an epoch is replaced by a longer one as it grows
    events.jsonl                     all of them in one, written at the run's end

Only the syncer of an epoch writes the segments of that epoch, so a takeover overwrites nothing. Every event goes to a
file of the syncer's machine first, and from there to the store, `FLUSH_S` later at most while the store answers: the
death of the process loses nothing, as the next syncer on that machine sends the rest; the loss of the machine costs
the events of the last `FLUSH_S`, or of as long as the store was away.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from app.run.lines import parsed
from app.run.remote import patiently
from app.run.storage import open_store
from app.run.tape_file import Tape

_log = logging.getLogger(__name__)

FOLDER = "events/"
FLUSH_S = 1.0
"""Seconds between two uploads of what is new."""
SEGMENT_BYTES = 256 * 1024
"""A segment that is as long as this is not added to any more."""
FOLLOW_S = 2.0
"""Seconds between two looks of a follower at the store."""
RETRY_S = 1.0
_SPOOL = ".spool"


class Segments:
    """The segments of one tape in its store."""

    def __init__(self, location: str) -> None:
        """`location`: URL of the one file."""
        folder, _, self._file = location.rpartition("/")
        self._store = open_store(folder)

    def sizes(self) -> dict[str, int]:
        """Names and bytes of all segments, in the order of their events."""
        return self._store.sizes(FOLDER)

    def read(self, name: str, start: int = 0) -> bytes:
        """One segment, from this byte on."""
        return self._store.read(name, start)

    def joined(self) -> bytes:
        """All lines; those of the one file where there are no segments."""
        names = list(self.sizes())
        if names:
            return b"".join(map(self._store.read, names))
        try:
            return self._store.read(self._file)
        except FileNotFoundError:
            return b""

    def started_at(self) -> float | None:
        """When the tape began, unix time; None where nothing is on it."""
        names = list(self.sizes())
        first = next(iter(parsed(self._store.read(names[0]))[0]), None) if names else None
        return float(first["at"]) if first else None

    def assemble(self) -> None:
        """Write the one file."""
        self._store.write(self._file, self.joined())

    def write(self, epoch: int, number: int, lines: bytes) -> None:
        """Put down a segment, or a longer one in its place."""
        self._store.write(f"{FOLDER}{epoch:09d}-{number:09d}.jsonl", lines)

    def of_epoch(self, epoch: int) -> list[int]:
        """Bytes of the segments of one epoch."""
        prefix = f"{FOLDER}{epoch:09d}-"
        return [size for name, size in self.sizes().items() if name.startswith(prefix)]


class SegmentTape:
    """Writes one epoch's segments. Any thread may write; a thread of its own sends."""

    def __init__(self, segments: Segments, epoch: int, spool: Path, flush_s: float = FLUSH_S) -> None:
        """`spool`: folder of this machine that belongs to the run."""
        self._segments, self._epoch, self._flush_s = segments, epoch, flush_s
        self._path = spool / f"{epoch:09d}{_SPOOL}"
        self._tape = Tape(self._path, patiently(segments.started_at))
        self._file = os.open(self._path, os.O_RDONLY)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # this syncer lives: what is here is not for others to send
        self._number, self._start, self._sent = 1, 0, 0
        """Segment that grows, where it begins in the file, and how much of the file is in the store."""
        self._turn = threading.Condition()
        self._wanted = False
        self._closed = False
        self._thread = threading.Thread(target=self._send_on_and_on, name="tape", daemon=True)
        self._thread.start()

    def write(self, kind: str, **fields: Any) -> None:
        """Add one event; as `Tape.write`."""
        self._tape.write(kind, **fields)

    def written(self, timeout_s: float) -> bool:
        """Whether others can read all that was written before this call, after so many seconds at most."""
        size = os.fstat(self._file).st_size
        with self._turn:
            self._wanted = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._sent >= size, timeout_s)
            return self._sent >= size and self._tape.written()

    def close(self) -> None:
        """Send what is left, once, and give the files back."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._thread.join()
        self._tape.close()
        os.close(self._file)

    def _send_on_and_on(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._wanted or self._closed, self._flush_s)
                self._wanted, closed = False, self._closed
            try:
                self._send()
            except OSError as error:
                _log.warning("events wait for the store: %s", error)
                if not closed:
                    time.sleep(RETRY_S)
            if closed:
                return

    def _send(self) -> None:
        lines = os.pread(self._file, os.fstat(self._file).st_size - self._start, self._start)
        lines = lines[: lines.rfind(b"\n") + 1]
        for part in cut(lines):
            if self._start + len(part) > self._sent:
                self._segments.write(self._epoch, self._number, part)
                with self._turn:
                    self._sent = self._start + len(part)
                    self._turn.notify_all()
            if len(part) >= SEGMENT_BYTES:
                self._start += len(part)
                self._number += 1


def cut(lines: bytes) -> list[bytes]:
    """Whole lines in parts that are just as long as `SEGMENT_BYTES` or a line longer; the last one may be shorter."""
    parts = []
    while len(lines) >= SEGMENT_BYTES:
        end = lines.index(b"\n", SEGMENT_BYTES - 1) + 1
        parts.append(lines[:end])
        lines = lines[end:]
    return [*parts, lines] if lines else parts


def send_left_behind(segments: Segments, spool: Path) -> None:
    """Send what syncers of this machine that are gone had not sent. Raises OSError; it may be called again."""
    for path in sorted(spool.glob(f"*{_SPOOL}")):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # it lives
            epoch = int(path.name.removesuffix(_SPOOL))
            sent = segments.of_epoch(epoch)  # in the order of the file, with nothing between them
            file.seek(sum(sent))
            rest = file.read()
            if rest and not rest.endswith(b"\n"):
                rest += b"\n"  # torn: closed, so that it spoils nothing after it
            if rest:
                segments.write(epoch, len(sent) + 1, rest)
            path.unlink()


class SegmentFollower:
    """Reads what is added to the segments, each event once."""

    def __init__(self, segments: Segments) -> None:
        """Start at their present end."""
        self._segments = segments
        self._read: dict[str, int] = {}
        self._started = False
        self._next_look = 0.0
        self._look()

    def fresh(self) -> list[dict[str, Any]]:
        """Events that came into the store since the last call; none while the store is away."""
        return parsed(self._look())[0] if time.monotonic() >= self._next_look else []

    def _look(self) -> bytes:
        self._next_look = time.monotonic() + FOLLOW_S
        found = b""
        try:
            sizes = self._segments.sizes()
            if not self._started:
                self._started, self._read = True, sizes
            for name, size in sizes.items():
                start = self._read.get(name, 0)
                if size > start:
                    lines = self._segments.read(name, start)
                    self._read[name] = start + len(lines)
                    found += lines
        except OSError as error:
            _log.info("the tape can't be read now: %s", error)
        return found
