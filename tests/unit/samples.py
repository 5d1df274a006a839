"""The data of a `World`: a lease book that dies now and then, learners that take samples, and who used which."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.diloco.messages import Consumed
from app.learning.blocks import Permutation, Place
from app.learning.leases import Lease, LeaseBook, StaleIncarnation

Sample = tuple[int, int, int]
"""Epoch, block and place in it."""
SAMPLES, BLOCK_SAMPLES = 37, 8


@dataclass
class Bag:
    """What one incarnation has leased, in order, and what it has taken."""

    request: int = 0
    ahead: list[Sample] = field(default_factory=list)
    taken: list[Sample] = field(default_factory=list)


class Samples:
    """The ledger and everybody's bags."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocks = Permutation(seed, SAMPLES, BLOCK_SAMPLES)
        self.book = LeaseBook(self.blocks)
        self.bags: dict[tuple[str, int], Bag] = {}
        self.used: dict[tuple[str, int], int] = {}
        """By what versions say that were journaled."""

    def take(self, learner: str, incarnation: int, wanted: int, faults: bool) -> int:
        """Take the samples of a step; those that there are, when the ledger is away."""
        bag = self.bags.setdefault((learner, incarnation), Bag())
        while len(bag.ahead) < wanted:
            try:
                lease = self.book.lease(learner, incarnation, bag.request)
            except StaleIncarnation:
                break
            self.crash(faults)
            if faults and self.random.random() < 0.2:
                break  # the answer is lost: the same request again, next time
            assert lease is not None
            bag.request += 1
            bag.ahead += of_place(lease)
        taken, bag.ahead = bag.ahead[:wanted], bag.ahead[wanted:]
        bag.taken += taken
        return len(taken)

    def consume(self, consumed: Sequence[Consumed], faults: bool) -> None:
        for entry in consumed:
            self.book.consume(entry.learner, entry.incarnation, entry.used, entry.taken, entry.ended)
        self.crash(faults)

    def crash(self, faults: bool) -> None:
        """The ledger dies: what it had written down before it answered is all that is left."""
        if faults and self.random.random() < 0.1:
            self.book = LeaseBook.from_state(self.blocks, json.loads(json.dumps(self.book.state())))

    def journaled(self, learner: str, incarnation: int, samples: int) -> None:
        who = (learner, incarnation)
        self.used[who] = max(self.used.get(who, 0), samples)

    def check(self) -> None:
        """Of all that was issued nothing is lost, and nothing was used twice."""
        state, counts = self.book.state(), self.book.counts
        assert counts.exact
        assert state["open"] == []  # the run has ended
        used = Counter(s for who, n in self.used.items() for s in self.bags[who].taken[:n])
        assert all(count == 1 for count in used.values())
        returned = [(p["epoch"], p["block"], i) for p in state["returned"] for i in range(p["start"], p["end"])]
        issued = [s for n in range(state["next_block"]) for s in of_place(self.blocks.place(n))]
        assert sorted([*used, *returned]) == issued
        assert counts.used == len(used)
        again = sum(len(bag.taken) - self.used.get(who, 0) for who, bag in self.bags.items())
        assert 0 <= counts.reissued <= again  # what a dead learner could not tell any more is not known


def of_place(place: Lease | Place) -> list[Sample]:
    return [(place.epoch, place.block, i) for i in range(place.start, place.end)]
