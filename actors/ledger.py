"""The data ledger: a detached actor round the lease book. Its state is on disk before an answer leaves.

A disk that is full or gone holds nobody up: blocks are leased on, and the next change writes everything. Only a ledger
that dies meanwhile issues again what it leased in that time.
"""

from __future__ import annotations

import json
import logging
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
from app.run.storage import open_store

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """A lease book and its file."""

    def __init__(self, checkpoints: str):
        self._store = open_store(checkpoints)
        self._found = json.loads(self._store.read(STATE)) if self._store.exists(STATE) else None
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
        try:
            self._store.write(STATE, json.dumps(self._state()).encode())
            self._saved = True
        except OSError:
            self._saved = False
            _log.exception("the ledger's state can't be written")


class Ledger(LeaseKeeper):
    """Leases blocks of one seeded permutation; a restart goes on where the last answer left it."""

    def __init__(self, checkpoints: str, seed: int, samples: int, block_samples: int):
        """Plain values, not the run's whole description: this process needs no torch, so it is up at once."""
        super().__init__(checkpoints)
        self._open(Permutation(seed, samples, block_samples))
