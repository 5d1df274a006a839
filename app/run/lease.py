"""One driver at a time: a lock on a folder of this machine, or a lease in a store that has no locks."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.run.storage import Store

_log = logging.getLogger(__name__)

FOLDER = "lease/"
RENEW_S = 2.0
"""Seconds between two renewals."""
TERM_S = 15.0
"""A lease that was not renewed for so long, watched by whoever wants it, is free. Longer than one slow answer."""


class Lock:
    """A lock on a folder of this machine, held until `release` or the death of the process."""

    lost = False
    """Nobody can take it from a living process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: another process holds it.
        """
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Give the lock back; a second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Lease:
    """The same in a store: an object that its owner renews, under the highest number in `lease/`.

    What it can do: of several who start at once one goes on, as a number is created once; one that lives and reaches
    the store is not replaced; one that died is, after `term_s`. No clocks are compared: who wants the lease watches it.

    What it can't: an owner that stood still or was cut off for longer than `term_s` is replaced and learns of it at its
    next renewal only (`lost`). Until then both work, and what they write is kept apart by the journal's epochs alone:
    the one that claimed last goes on, the other is fenced.
    """

    def __init__(
        self,
        store: Store,
        renew_s: float = RENEW_S,
        term_s: float = TERM_S,
        tell: Callable[[str], None] = _log.info,
    ) -> None:
        """Take the lease. `tell` hears of a wait for one that may be held.

        Raises:
            BlockingIOError: another driver holds it.
            OSError: the store can't be used.
        """
        self.lost = False
        """Another driver has taken over."""
        self._store, self._renew_s, self._term_s = store, renew_s, term_s
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        self._beat = 0
        self._stop = threading.Event()
        newest = self._newest()
        if newest:
            self._wait_until_free(newest, tell)
        self._number = newest + 1
        self._take()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lease back; a second time does nothing. A store that is away keeps it until its term ends."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(self._term_s)
        try:
            if not self.lost:
                self._put(released=True)
        except OSError as error:
            _log.warning("the lease was not given back: %s", error)

    def _wait_until_free(self, number: int, tell: Callable[[str], None]) -> None:
        first = self._read(number)
        if first is None or first["released"]:
            return
        tell(f"waiting {self._term_s:g} s to see whether {first['owner'].rpartition(':')[0]} is still at work ...")
        end = time.monotonic() + self._term_s
        while time.monotonic() < end:
            time.sleep(min(self._renew_s, self._term_s) / 2)
            now = self._read(number)
            if now is None or now["released"]:
                return
            if now != first:
                raise BlockingIOError(f"held by {now['owner']}")

    def _take(self) -> None:
        try:
            self._store.create(self._name(self._number), self._body(released=False))
        except FileExistsError:
            found = self._read(self._number)
            if found is None or found["owner"] != self._owner:  # else it is this one's, whose answer was lost
                raise BlockingIOError("another driver was quicker") from None
        if self._newest() != self._number:  # the number had been used and removed by those after it
            raise BlockingIOError("another driver was quicker")
        for name in self._store.names(FOLDER):
            if name < self._name(self._number):
                self._store.delete(name)

    def _renew(self) -> None:
        while not self._stop.wait(self._renew_s):
            try:
                self._put(released=False)
                if self._newest() != self._number:
                    _log.error("another driver has taken over")
                    self.lost = True
                    return
            except OSError as error:
                _log.warning("the lease is not renewed: %s", error)

    def _put(self, *, released: bool) -> None:
        self._beat += 1
        self._store.write(self._name(self._number), self._body(released=released))

    def _body(self, *, released: bool) -> bytes:
        return json.dumps({"owner": self._owner, "beat": self._beat, "released": released}).encode()

    def _read(self, number: int) -> dict[str, Any] | None:
        """A lease's present content; None when it was removed. One that can't be understood counts as held."""
        try:
            data = self._store.read(self._name(number))
        except FileNotFoundError:
            return None
        try:
            found = json.loads(data)
            return {"owner": str(found["owner"]), "beat": found["beat"], "released": found["released"] is True}
        except (ValueError, TypeError, KeyError):
            return {"owner": "?:?", "beat": data.hex(), "released": False}

    def _newest(self) -> int:
        names = self._store.names(FOLDER)
        return max((int(name[len(FOLDER) : -len(".json")]) for name in names), default=0)

    def _name(self, number: int) -> str:
        return f"{FOLDER}{number:09d}.json"
