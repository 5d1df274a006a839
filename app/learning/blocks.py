"""Who trains on which samples: blocks of one seeded permutation, leased out and taken back.

Pure: no clock, no cluster. A learner leases whole blocks and works out the sample indices itself from (seed, epoch),
so a lease is a few integers. Nothing depends on how many learners there are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt


class StaleIncarnation(ValueError):
    """A lease was asked for by an incarnation that has been dropped or replaced."""


@dataclass(frozen=True)
class Lease:
    """The right to train on block `block` of epoch `epoch`, from its `start`-th sample on."""

    id: int
    learner: str
    incarnation: int
    request: int
    epoch: int
    block: int
    start: int


@dataclass(frozen=True)
class Returned:
    """A block, or the rest of one from `start` on, that came back and is issued again before new ones."""

    epoch: int
    block: int
    start: int


class Permutation:
    """One permutation of all samples for each epoch, cut into blocks; the last block of an epoch may be short."""

    def __init__(self, seed: int, n_samples: int, block_samples: int) -> None:
        if n_samples < 1 or block_samples < 1:
            raise ValueError(f"need samples and a block size, got {n_samples} and {block_samples}")
        self._seed = seed
        self._n_samples = n_samples
        self._block_samples = block_samples
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def blocks(self) -> int:
        """Blocks in an epoch."""
        return -(-self._n_samples // self._block_samples)

    def indices(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        """Return the sample indices of a block, [block_samples] or fewer. Raises IndexError past the epoch's end."""
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} of {self.blocks}")
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
            self._order = generator.permutation(self._n_samples)
            self._epoch = epoch
        return self._order[block * self._block_samples : (block + 1) * self._block_samples]


class LeaseBook:
    """Which incarnation holds which block; what came back; where the permutation goes on.

    Every call may be delivered twice. A request number, rising within an incarnation, makes a lease idempotent; a
    block that was returned gets a new lease id, so what an old holder says about it later has no effect.
    """

    def __init__(self, blocks_per_epoch: int) -> None:
        if blocks_per_epoch < 1:
            raise ValueError(f"need at least one block, got {blocks_per_epoch}")
        self._blocks_per_epoch = blocks_per_epoch
        self._next_block = 0  # counted over all epochs
        self._next_id = 0
        self._open: dict[int, Lease] = {}
        self._returned: list[Returned] = []
        self._newest: dict[str, int] = {}  # learner → newest incarnation known
        self._dropped: dict[str, int] = {}  # learner → newest incarnation dropped
        self._answered: dict[str, int] = {}  # learner → highest request answered to its newest incarnation

    def lease(self, learner: str, incarnation: int, request: int) -> Lease | None:
        """Lease the next block: one that came back if there is any, else a new one.

        The same request again gets the same lease, or None when that lease has ended. A newer incarnation drops the
        older ones of its learner; an older one raises StaleIncarnation.
        """
        newest = self._newest.get(learner, -1)
        if incarnation < newest or incarnation <= self._dropped.get(learner, -1):
            raise StaleIncarnation(f"{learner}: incarnation {incarnation} is no longer served")
        if incarnation > newest:
            self.drop(learner, newest)
            self._newest[learner] = incarnation
            self._answered.pop(learner, None)
        if request <= self._answered.get(learner, -1):
            return self._find(learner, request)
        place = self._returned.pop(0) if self._returned else self._new_block()
        lease = Lease(self._next_id, learner, incarnation, request, place.epoch, place.block, place.start)
        self._next_id += 1
        self._answered[learner] = request
        self._open[lease.id] = lease
        return lease

    def renew(self, lease: Lease, start: int) -> bool:
        """Note that the samples before `start` are used, so that a drop returns the rest only. False: not open."""
        held = self._held(lease)
        if held is None:
            return False
        self._open[held.id] = replace(held, start=max(held.start, start))
        return True

    def release(self, lease: Lease) -> bool:
        """Take a block (the rest of it) back, to be issued again. False when the lease is not open."""
        held = self._close(lease)
        if held is None:
            return False
        self._returned.append(Returned(held.epoch, held.block, held.start))
        self._returned.sort(key=lambda r: (r.epoch, r.block, r.start))
        return True

    def done(self, lease: Lease) -> bool:
        """End a lease whose samples are all used. False when it is not open."""
        return self._close(lease) is not None

    def _close(self, lease: Lease) -> Lease | None:
        held = self._held(lease)
        return None if held is None else self._open.pop(held.id)

    def _held(self, lease: Lease) -> Lease | None:
        """The open lease that is meant. A book that fell back to an older state may give the same id out again."""
        held = self._open.get(lease.id)
        return held if held is not None and replace(held, start=lease.start) == lease else None

    def drop(self, learner: str, incarnation: int) -> list[Lease]:
        """Take back all leases of this learner's incarnations up to `incarnation`, and serve those no more."""
        lost = [lease for lease in self._open.values() if lease.learner == learner and lease.incarnation <= incarnation]
        for lease in lost:
            self.release(lease)
        self._dropped[learner] = max(self._dropped.get(learner, -1), incarnation)
        return lost

    def state(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return {
            "blocks_per_epoch": self._blocks_per_epoch,
            "next_block": self._next_block,
            "next_id": self._next_id,
            "open": [asdict(lease) for lease in self._open.values()],
            "returned": [asdict(place) for place in self._returned],
            "newest": dict(self._newest),
            "dropped": dict(self._dropped),
            "answered": dict(self._answered),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LeaseBook:
        """Return the book that `state()` described."""
        book = cls(state["blocks_per_epoch"])
        book._next_block = state["next_block"]
        book._next_id = state["next_id"]
        book._open = {lease["id"]: Lease(**lease) for lease in state["open"]}
        book._returned = [Returned(**place) for place in state["returned"]]
        book._newest = dict(state["newest"])
        book._dropped = dict(state["dropped"])
        book._answered = dict(state["answered"])
        return book

    def _new_block(self) -> Returned:
        epoch, block = divmod(self._next_block, self._blocks_per_epoch)
        self._next_block += 1
        return Returned(epoch, block, 0)

    def _find(self, learner: str, request: int) -> Lease | None:
        newest = self._newest[learner]
        for lease in self._open.values():
            if (lease.learner, lease.incarnation, lease.request) == (learner, newest, request):
                return lease
        return None
