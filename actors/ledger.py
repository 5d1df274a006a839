"""The data ledger: a detached actor round the lease book. Its state is on disk before an answer leaves.

A disk that is full or gone holds nobody up: blocks are leased on, and the next change writes everything. Only a ledger
that dies meanwhile issues again what it leased in that time.
"""

from __future__ import annotations

import json
import logging
import os

from actors.service import Whereabouts, whereabouts
from app.learning.blocks import Lease, LeaseBook, Permutation
from app.run.storage import open_store

STATE = "ledger.json"
_log = logging.getLogger(__name__)


class Ledger:
    """Leases blocks of one seeded permutation; a restart goes on where the last answer left it."""

    def __init__(self, checkpoints: str, seed: int, samples: int, block_samples: int):
        """Plain values, not the run's whole description: this process needs no torch, so it is up at once."""
        self._store = open_store(checkpoints)
        if self._store.exists(STATE):
            self._book = LeaseBook.from_state(json.loads(self._store.read(STATE)))
        else:
            self._book = LeaseBook(Permutation(seed, samples, block_samples).blocks)

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def where(self) -> Whereabouts:
        """Node and process."""
        return whereabouts()

    def lease(self, learner: str, incarnation: int, request: int) -> Lease | None:
        """The next block for this learner; the same request gets the same block. Raises StaleIncarnation."""
        lease = self._book.lease(learner, incarnation, request)
        self._save()
        return lease

    def renew(self, lease: Lease, start: int) -> None:
        """Samples before `start` of this block are used."""
        if self._book.renew(lease, start):
            self._save()

    def done(self, lease: Lease) -> None:
        """All samples of this block are used."""
        if self._book.done(lease):
            self._save()

    def drop(self, learner: str, incarnation: int) -> None:
        """This incarnation is gone: its blocks, or what is left of them, are issued again."""
        self._book.drop(learner, incarnation)
        self._save()

    def _save(self) -> None:
        try:
            self._store.write(STATE, json.dumps(self._book.state()).encode())
        except OSError:
            _log.exception("the ledger's state can't be written")
