"""A tape in one file of this machine: `events.jsonl`."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from app.run.lines import encoded, parsed

WAITING = 10_000
"""Events that are kept while the disk is full; of more, the oldest are lost."""


class Tape:
    """Appends events to a file of this machine. Any thread may write.

    Every event has `kind`, `at` (unix time, seconds) and `t` (seconds since the tape's first event). A line
    that a kill cut short is closed when the tape is opened again, so that it spoils nothing after it.
    """

    def __init__(self, path: Path, start: float | None = None) -> None:
        """`start`: when a tape began that this one goes on with (unix time), unless the file itself tells."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        self._waiting: deque[bytes] = deque(maxlen=WAITING)
        """Lines that could not be written."""
        first = next(iter(parsed(path.read_bytes())[0]), None) if size else None
        self._start: float | None = float(first["at"]) if first else start

    def write(self, kind: str, **fields: Any) -> None:
        """Add one event, of now unless `at` says when it was.

        NaN and infinities become null, as JSON has no word for them.

        Raises:
            TypeError: a field that JSON can't hold.
            OSError: the disk is full or gone; the event is kept and written before the next one.
        """
        at = fields.pop("at", None) or time.time()
        with self._lock:
            self._start = at if self._start is None else self._start
            event = {"kind": kind, "at": at, "t": at - self._start, **fields}
            self._waiting.append(encoded(event))
            while self._waiting:
                self._put(self._waiting[0])
                self._waiting.popleft()

    def _put(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        written = os.write(self._file, line)
        if written < len(line):
            self._torn = True
            raise OSError(errno.ENOSPC, "an event was cut short")
        self._torn = False

    def written(self, _timeout_s: float = 0.0) -> bool:
        """Whether others can read all that was written before this call. A file needs no time for that."""
        return not self._waiting

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)


class FileFollower:
    """Reads what is added to the file, each event once."""

    def __init__(self, path: Path) -> None:
        """Start at its present end; it may not exist yet."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def fresh(self) -> list[dict[str, Any]]:
        """Events whose lines were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(whole)
        return parsed(whole)[0]
