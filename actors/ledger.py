"""The data ledger: a detached actor round the lease book. Its state is on disk before an answer leaves.

A disk that is full or gone, or a store that is away, holds nobody up: blocks are leased on, and everything is written
once that is possible. Only a ledger that dies meanwhile issues again what it leased in that time.
"""

from __future__ import annotations

import json
import os

from actors.service import Whereabouts, whereabouts
from app.learning.blocks import Lease, LeaseBook, Permutation
from app.run.saver import Saver
from app.run.storage import open_store

STATE = "ledger.json"


class Ledger:
    """Leases blocks of one seeded permutation; a restart goes on where the last answer left it."""

    def __init__(self, checkpoints: str, seed: int, samples: int, block_samples: int):
        """Plain values, not the run's whole description: this process needs no torch, so it is up at once."""
        self._saver = Saver(open_store(checkpoints), STATE)
        state = self._saver.load()
        if state is not None:
            self._book = LeaseBook.from_state(json.loads(state))
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
        self._saver.save(json.dumps(self._book.state()).encode())
