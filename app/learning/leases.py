"""Who trains on which samples: blocks are leased out, used up as the syncer's journal says, and taken back.

Pure: no clock, no cluster. An incarnation takes samples in the order of its leases, so one number, how many of its
samples durable versions hold work on, says which are used (`docs/protocol.md`). What a dead one leased beyond that is
issued again.
"""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.learning.blocks import Blocks, Place


class StaleIncarnation(ValueError):
    """A lease was asked for by an incarnation that has ended or was replaced."""


@dataclass(frozen=True)
class Lease:
    """The right to train on samples `start` to `end` (not included) of block `block` of epoch `epoch`."""

    id: int
    learner: str
    incarnation: int
    request: int
    epoch: int
    block: int
    start: int
    end: int
    before: int
    """Samples that the incarnation leased before this lease."""

    def used(self, samples: int) -> int:
        """How many of its samples are among the first `samples` that the incarnation takes."""
        return min(max(samples - self.before, 0), self.end - self.start)


@dataclass
class Counts:
    """Samples, epochs counted again: issued = used + leased + returned, where nothing is lost or twice in use."""

    issued: int = 0
    """Leased for the first time."""
    used: int = 0
    """In blocks, or parts of them, that will not be issued again."""
    leased: int = 0
    """Out."""
    returned: int = 0
    """Taken back and not issued again yet."""
    reissued: int = 0
    """Taken back although a learner had trained on them: it died before any of that was merged."""

    @property
    def exact(self) -> bool:
        """Whether every sample is in one place."""
        return self.issued == self.used + self.leased + self.returned


class LeaseBook:
    """Which incarnation holds which block; what came back; where the data goes on.

    Every call may be delivered twice. A request number, rising within an incarnation, makes a lease idempotent.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._next_block = 0
        self._next_id = 0
        self._open: dict[int, Lease] = {}
        self._returned: list[Place] = []
        self._newest: dict[str, int] = {}  # learner → newest incarnation known
        self._ended: dict[str, int] = {}  # learner → newest incarnation that ended
        self._answered: dict[str, int] = {}  # learner → highest request answered to its newest incarnation
        self._given: dict[str, int] = {}  # learner → samples leased to its newest incarnation
        self._counts = Counts()

    def lease(self, learner: str, incarnation: int, request: int) -> Lease | None:
        """Lease the next block: one that came back if there is any, else a new one; None when none is known yet.

        The same request again gets the same lease, or None when that lease has ended. An incarnation that ended, or
        is older than one that was here, raises StaleIncarnation.
        """
        newest = self._newest.get(learner, -1)
        if incarnation < newest or incarnation <= self._ended.get(learner, -1):
            raise StaleIncarnation(f"{learner}: incarnation {incarnation} is no longer served")
        if incarnation > newest:
            self._newest[learner], self._given[learner] = incarnation, 0
            self._answered.pop(learner, None)
        if request <= self._answered.get(learner, -1):
            return self._find(learner, incarnation, request)
        place = self._returned.pop(0) if self._returned else self._new_block()
        if place is None:
            return None
        lease = Lease(self._next_id, learner, incarnation, request, **asdict(place), before=self._given[learner])
        self._next_id += 1
        self._answered[learner] = request
        self._given[learner] += place.end - place.start
        self._open[lease.id] = lease
        return lease

    def consume(self, learner: str, incarnation: int, used: int, taken: int, ended: bool) -> bool:
        """Note that the first `used` samples of an incarnation are used, of `taken` that it trained on by its own word.

        One that `ended` gives back the rest of all that it leased, and is served no more. Tells whether that changed
        what the state must remember.
        """
        leases = [x for x in self._open.values() if (x.learner, x.incarnation) == (learner, incarnation)]
        over = [lease for lease in leases if ended or lease.used(used) == lease.end - lease.start]
        for lease in over:
            self._close(lease, used, taken)
        news = ended and incarnation > self._ended.get(learner, -1)
        if news:
            self._ended[learner] = incarnation
        return news or bool(over)

    def _close(self, lease: Lease, used: int, taken: int) -> None:
        del self._open[lease.id]
        count = lease.used(used)
        self._counts.used += count
        self._counts.reissued += max(lease.used(taken) - count, 0)
        if lease.start + count < lease.end:
            bisect.insort(self._returned, Place(lease.epoch, lease.block, lease.start + count, lease.end))

    @property
    def counts(self) -> Counts:
        """Samples by where they are."""
        leased = sum(lease.end - lease.start for lease in self._open.values())
        returned = sum(place.end - place.start for place in self._returned)
        return replace(self._counts, leased=leased, returned=returned)

    @property
    def outstanding(self) -> set[tuple[int, int]]:
        """(epoch, block) of whatever may have to be issued again."""
        return {(x.epoch, x.block) for x in self._open.values()} | {(x.epoch, x.block) for x in self._returned}

    def state(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return {
            "next_block": self._next_block,
            "next_id": self._next_id,
            "open": [asdict(lease) for lease in self._open.values()],
            "returned": [asdict(place) for place in self._returned],
            "newest": dict(self._newest),
            "ended": dict(self._ended),
            "answered": dict(self._answered),
            "given": dict(self._given),
            "counts": asdict(self._counts),
        }

    @classmethod
    def from_state(cls, blocks: Blocks, state: dict[str, Any]) -> LeaseBook:
        """Return the book that `state()` described. Raises KeyError or TypeError when it is none."""
        book = cls(blocks)
        book._next_block = state["next_block"]
        book._next_id = state["next_id"]
        book._open = {lease["id"]: Lease(**lease) for lease in state["open"]}
        book._returned = [Place(**place) for place in state["returned"]]
        book._newest = dict(state["newest"])
        book._ended = dict(state["ended"])
        book._answered = dict(state["answered"])
        book._given = dict(state["given"])
        book._counts = Counts(**state["counts"])
        return book

    def _new_block(self) -> Place | None:
        place = self._blocks.place(self._next_block)
        if place is not None:
            self._next_block += 1
            self._counts.issued += place.end - place.start
        return place

    def _find(self, learner: str, incarnation: int, request: int) -> Lease | None:
        wanted = (learner, incarnation, request)
        return next((x for x in self._open.values() if (x.learner, x.incarnation, x.request) == wanted), None)
