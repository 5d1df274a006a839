import json

import numpy as np
import pytest

from app.learning.blocks import Lease, LeaseBook, Permutation, StaleIncarnation


def places(leases):
    return [(lease.epoch, lease.block, lease.start) for lease in leases]


def test_an_epochs_blocks_are_every_sample_once():
    permutation = Permutation(seed=3, n_samples=10, block_samples=4)
    assert permutation.blocks == 3
    blocks = [permutation.indices(0, block) for block in range(3)]
    assert [len(b) for b in blocks] == [4, 4, 2]
    assert sorted(np.concatenate(blocks).tolist()) == list(range(10))
    with pytest.raises(IndexError):
        permutation.indices(0, 3)


def test_a_permutation_is_a_function_of_seed_and_epoch_alone():
    def whole(seed, epoch):
        return Permutation(seed, 1000, 1000).indices(epoch, 0).tolist()

    jumping = Permutation(1, 1000, 10)
    assert [jumping.indices(epoch, 7).tolist() for epoch in (2, 0, 2)] == [
        whole(1, epoch)[70:80] for epoch in (2, 0, 2)
    ]
    assert whole(1, 0) != whole(1, 1)
    assert whole(1, 0) != whole(2, 0)


def test_leases_walk_through_epochs():
    book = LeaseBook(blocks_per_epoch=2)
    leases = [book.lease(f"learner-{i % 2}", 0, i) for i in range(5)]
    assert places(leases) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0)]
    assert len({lease.id for lease in leases}) == 5


def open_leases(book):
    """The leases that are out, oldest first."""
    return [Lease(**lease) for lease in book.state()["open"]]


def test_the_same_request_gets_the_same_lease():
    book = LeaseBook(9)
    first = book.lease("a", 0, 0)
    second = book.lease("a", 0, 1)
    assert book.lease("a", 0, 0) == first
    assert book.lease("a", 0, 1) == second
    assert book.lease("b", 0, 0) not in (first, second)
    assert book.done(first)
    assert book.lease("a", 0, 0) is None
    assert len(open_leases(book)) == 2


def test_returned_blocks_come_before_new_ones_lowest_first():
    book = LeaseBook(9)
    leases = [book.lease("a", 0, i) for i in range(3)]
    assert book.release(leases[1])
    assert book.release(leases[0])
    assert not book.release(leases[0])
    assert places(book.lease("b", 0, i) for i in range(3)) == [(0, 0, 0), (0, 1, 0), (0, 3, 0)]


def test_a_partly_used_block_comes_back_from_where_it_was():
    book = LeaseBook(9)
    lease = book.lease("a", 0, 0)
    assert book.renew(lease, 24)
    assert book.renew(lease, 16)  # an older message, delivered late
    book.release(lease)
    assert places([book.lease("b", 0, 0)]) == [(0, 0, 24)]
    assert not book.renew(lease, 40)


def test_dropping_an_incarnation_returns_all_it_holds_and_fences_it():
    book = LeaseBook(9)
    lost = [book.lease("a", 1, i) for i in range(2)]
    kept = book.lease("b", 5, 0)
    assert book.drop("a", 1) == lost
    assert book.drop("a", 1) == []
    assert open_leases(book) == [kept]
    with pytest.raises(StaleIncarnation):
        book.lease("a", 1, 2)
    assert places([book.lease("a", 2, 0)]) == [(0, 0, 0)]
    assert not book.done(lost[0])  # what the dead one says about its lease means nothing
    assert len(open_leases(book)) == 2


def test_a_newer_incarnation_drops_the_older_one():
    book = LeaseBook(9)
    book.lease("a", 0, 0)
    assert places([book.lease("a", 1, 0)]) == [(0, 0, 0)]
    with pytest.raises(StaleIncarnation):
        book.lease("a", 0, 1)
    assert not book.drop("a", 0)
    assert len(open_leases(book)) == 1


def test_no_block_is_lost_or_held_twice_whatever_happens():
    random = np.random.default_rng(0)
    book, incarnation, request = (
        LeaseBook(7),
        dict.fromkeys("abc", 0),
        dict.fromkeys("abc", 0),
    )
    finished: list[tuple[int, int]] = []
    for _ in range(2000):
        who, action = str(random.choice(list("abc"))), random.random()
        held = [lease for lease in open_leases(book) if lease.learner == who]
        if action < 0.5:
            book.lease(who, incarnation[who], request[who])
            request[who] += 1
        elif action < 0.8 and held:
            book.done(held[0])
            finished.append((held[0].epoch, held[0].block))
        elif action < 0.9 and held:
            book.release(held[-1])
        elif action > 0.97:
            book.drop(who, incarnation[who])
            incarnation[who] += 1
            request[who] = 0
        state = book.state()
        out = [(p["epoch"], p["block"]) for p in [*state["open"], *state["returned"]]]
        issued = [divmod(i, 7) for i in range(state["next_block"])]
        assert sorted(out + finished) == issued
        book = LeaseBook.from_state(json.loads(json.dumps(state)))


def test_state_survives_json():
    book = LeaseBook(3)
    leases = [book.lease("a", 0, i) for i in range(4)]
    book.release(leases[1])
    book.drop("b", 3)
    copy = LeaseBook.from_state(json.loads(json.dumps(book.state())))
    assert copy.state() == book.state()
    assert copy.lease("a", 0, 3) == Lease(3, "a", 0, 3, 1, 0, 0)
    assert copy.lease("a", 0, 4) == book.lease("a", 0, 4)
    with pytest.raises(StaleIncarnation):
        copy.lease("b", 3, 0)


def test_a_book_that_fell_back_to_an_older_state_does_not_mistake_a_lease_for_another():
    """Its disk was full while it leased id 1 and then it died: the same id goes out again."""
    older = LeaseBook.from_state(LeaseBook(9).state())
    book = LeaseBook(9)
    forgotten = book.lease("a", 0, 0)
    given = older.lease("b", 0, 0)
    assert given.id == forgotten.id
    assert not older.done(forgotten)
    assert not older.renew(forgotten, 8)
    assert not older.release(forgotten)
    assert open_leases(older) == [given]
    assert older.renew(given, 8)
    assert older.done(given)


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError):
        Permutation(0, 0, 4)
    with pytest.raises(ValueError):
        LeaseBook(0)
