"""Keeps the newest state of somebody who must not wait for a store that is full, slow or away."""

from __future__ import annotations

import logging
import threading
import time

from app.run.remote import patiently
from app.run.storage import Store

_log = logging.getLogger(__name__)

WAIT_S = 2.0
"""A store that has not answered after this long is not waited for, until it answers again."""
RETRY_S = 1.0


class Saver:
    """One blob of a store, written by a thread of its own; what was overtaken by something newer is left out."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._turn = threading.Condition()
        self._data = b""
        self._given, self._kept = 0, 0
        """States handed over so far, and how many of them (or of newer ones) are in the store."""
        self._failing = False
        threading.Thread(target=self._write, name=f"save {name}", daemon=True).start()

    def load(self) -> bytes | None:
        """What is there, None when nothing is. A store that is away is waited for."""
        try:
            return patiently(lambda: self._store.read(self._name))
        except FileNotFoundError:
            return None

    def save(self, data: bytes) -> bool:
        """Keep `data`; True when it is in the store. False: the store fails or is slow, and it is tried on and on."""
        with self._turn:
            self._data = data
            self._given += 1
            mine = self._given
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._kept >= mine or self._failing, WAIT_S)
            if self._kept < mine:
                self._failing = True  # nobody waits again before it works
            return self._kept >= mine

    def _write(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._given > self._kept)
                data, upto = self._data, self._given
            try:
                self._store.write(self._name, data)
            except OSError as error:
                _log.warning("%s can't be written: %s", self._name, error)
                with self._turn:
                    self._failing = True
                    self._turn.notify_all()
                time.sleep(RETRY_S)
                continue
            with self._turn:
                self._kept, self._failing = upto, False
                self._turn.notify_all()
