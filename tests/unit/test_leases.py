"""The lease book. What must hold over whole runs with deaths is in test_network.py."""

import json

import pytest

from app.learning.blocks import Permutation
from app.learning.leases import Counts, Lease, LeaseBook, StaleIncarnation

BLOCKS = Permutation(0, 20, 8)
"""8, 8 and 4 samples."""


@pytest.fixture
def book():
    return LeaseBook(BLOCKS)


def places(leases):
    return [(lease.epoch, lease.block, lease.start, lease.end) for lease in leases]


def open_leases(book):
    """The leases that are out, oldest first."""
    return [Lease(**lease) for lease in book.state()["open"]]


def test_leases_walk_through_epochs(book):
    leases = [book.lease(f"learner-{i % 2}", 0, i) for i in range(4)]
    assert places(leases) == [(0, 0, 0, 8), (0, 1, 0, 8), (0, 2, 0, 4), (1, 0, 0, 8)]
    assert [lease.before for lease in leases] == [0, 0, 8, 8]
    assert len({lease.id for lease in leases}) == 4


def test_the_same_request_gets_the_same_lease(book):
    first, second = book.lease("a", 0, 0), book.lease("a", 0, 1)
    assert book.lease("a", 0, 0) == first
    assert book.lease("a", 0, 1) == second
    assert book.lease("b", 0, 0) not in (first, second)
    book.consume("a", 0, 8, 8, ended=False)
    assert book.lease("a", 0, 0) is None
    assert len(open_leases(book)) == 2


def test_a_lease_ends_when_all_of_it_is_used(book):
    for request in range(3):
        book.lease("a", 0, request)
    assert not book.consume("a", 0, 7, 15, ended=False)
    assert book.consume("a", 0, 17, 20, ended=False)
    assert [lease.request for lease in open_leases(book)] == [2]
    assert book.counts == Counts(issued=20, used=16, leased=4)
    assert not book.consume("a", 0, 17, 20, ended=False)  # twice
    assert not book.consume("a", 0, 3, 3, ended=False)  # late
    assert book.counts == Counts(issued=20, used=16, leased=4)


def test_what_a_dead_one_had_not_merged_is_issued_again_lowest_first(book):
    for request in range(3):
        book.lease("a", 1, request)
    assert book.consume("a", 1, 10, 13, ended=True)
    assert book.counts == Counts(issued=20, used=10, returned=10, reissued=3)
    assert not book.consume("a", 1, 10, 13, ended=True)  # twice
    assert places(book.lease("b", 0, i) for i in range(3)) == [(0, 1, 2, 8), (0, 2, 0, 4), (1, 0, 0, 8)]
    assert [lease.before for lease in open_leases(book)] == [0, 6, 10]
    assert book.counts == Counts(issued=28, used=10, leased=18, reissued=3)


def test_who_has_ended_is_served_no_more(book):
    book.lease("a", 1, 0)
    assert book.consume("a", 1, 0, 0, ended=True)
    with pytest.raises(StaleIncarnation):
        book.lease("a", 1, 1)
    assert places([book.lease("a", 2, 0)]) == [(0, 0, 0, 8)]


def test_that_somebody_without_a_lease_has_ended_must_be_remembered(book):
    assert book.consume("a", 1, 0, 0, ended=True)
    with pytest.raises(StaleIncarnation):
        LeaseBook.from_state(BLOCKS, book.state()).lease("a", 1, 0)


def test_a_newer_incarnation_fences_the_older_one_whose_leases_wait_for_the_journal(book):
    book.lease("a", 0, 0)
    assert places([book.lease("a", 1, 0)]) == [(0, 1, 0, 8)]
    with pytest.raises(StaleIncarnation):
        book.lease("a", 0, 1)
    book.consume("a", 0, 5, 6, ended=True)
    assert places([book.lease("a", 1, 1)]) == [(0, 0, 5, 8)]


def test_state_survives_json(book):
    for i in range(4):
        book.lease("a", 0, i)
    book.consume("b", 3, 0, 0, ended=True)
    book.consume("a", 0, 9, 9, ended=False)
    copy = LeaseBook.from_state(BLOCKS, json.loads(json.dumps(book.state())))
    assert copy.state() == book.state()
    assert copy.counts == book.counts
    assert copy.lease("a", 0, 3) == Lease(3, "a", 0, 3, 1, 0, 0, 8, 20)
    assert copy.lease("a", 0, 4) == book.lease("a", 0, 4)
    with pytest.raises(StaleIncarnation):
        copy.lease("b", 3, 0)


def test_where_no_block_is_known_yet_the_same_request_comes_again():
    class Waiting:
        known = False

        def place(self, number):
            return BLOCKS.place(number) if self.known else None

    blocks = Waiting()
    book = LeaseBook(blocks)
    assert book.lease("a", 0, 0) is None
    blocks.known = True
    assert places([book.lease("a", 0, 0)]) == [(0, 0, 0, 8)]
    assert book.outstanding == {(0, 0)}
