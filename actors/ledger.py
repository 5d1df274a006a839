"""The data ledger: a detached actor round the lease book. Its state is on disk before an answer leaves.

A disk that is full or gone, or a store that is away, holds nobody up: blocks are leased on, and everything is written
once that is possible. Only a ledger that dies meanwhile issues again what it leased in that time.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from typing import Any

from actors.service import Whereabouts, whereabouts
from app.diloco.messages import Consumed
from app.learning.blocks import Blocks, Permutation
from app.learning.leases import Counts, Lease, LeaseBook
from app.run.cuts import FOLDER
from app.run.cuts import LEDGER as STATE
from app.run.saver import Saver
from app.run.storage import open_store


class LeaseKeeper:
    """A lease book and its file."""

    def __init__(self, checkpoints: str):
        self._store = open_store(checkpoints)
        self._saver = Saver(self._store, STATE)
        state = self._saver.load()
        self._found = None if state is None else json.loads(state)
        """The state that an earlier process has left."""
        self._lock = threading.Lock()
        self._saved = True
        self._book: LeaseBook

    def _open(self, blocks: Blocks) -> None:
        found = self._found
        self._book = LeaseBook(blocks) if found is None else LeaseBook.from_state(blocks, found["book"])

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def where(self) -> Whereabouts:
        """Node and process."""
        return whereabouts()

    def lease(self, learner: str, incarnation: int, request: int) -> Lease | None:
        """The next block for this learner; the same request gets the same block. Raises StaleIncarnation."""
        with self._lock:
            lease = self._book.lease(learner, incarnation, request)
            self._save()
        return lease

    def consume(self, consumed: Sequence[Consumed]) -> Counts | None:
        """Take note of what the syncer's journal says; None when that could not be made durable."""
        with self._lock:
            changed = [self._book.consume(c.learner, c.incarnation, c.used, c.taken, c.ended) for c in consumed]
            if any(changed) or not self._saved:
                self._save()
            return self._book.counts if self._saved else None

    def capture(self, cut: str) -> None:
        """Save the state of this moment as the ledger's part of a consistent cut. Raises OSError."""
        with self._lock:
            state = json.dumps(self._state()).encode()
        self._store.write(f"{FOLDER}{cut}/{STATE}", state)

    def _state(self) -> dict[str, Any]:
        return {"book": self._book.state()}

    def _save(self) -> None:
        self._saved = self._saver.save(json.dumps(self._state()).encode())


class Ledger(LeaseKeeper):
    """Leases blocks of one seeded permutation; a restart goes on where the last answer left it."""

    def __init__(self, checkpoints: str, seed: int, samples: int, block_samples: int):
        """Plain values, not the run's whole description: this process needs no torch, so it is up at once."""
        super().__init__(checkpoints)
        self._open(Permutation(seed, samples, block_samples))
