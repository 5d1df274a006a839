"""The journal in every kind of store: the same behaviour on a disk, in memory and in an object store."""

import threading
from pathlib import Path

import pytest
import torch

from app.run.journal import Fenced, Journal, JournalDamaged
from app.run.storage import Store, open_store
from tests.s3 import S3Server

TENSORS = {"theta": torch.arange(6.0).reshape(2, 3), "none": torch.zeros(0)}


@pytest.fixture
def store(location: str) -> Store:
    return open_store(location)


def opened(store: Store, keep: int = 2) -> Journal:
    journal = Journal(store, keep)
    journal.claim_epoch()
    return journal


def merges(store: Store) -> list[int]:
    snapshot, records = Journal(store, 2).load()
    first = [snapshot.meta["merge"]] if snapshot else []
    return first + [record.meta["merge"] for record in records]


def test_claim_append_snapshot_load(store: Store) -> None:
    journal = opened(store)
    assert journal.epoch == 1
    assert [journal.append({"merge": i}, TENSORS) for i in range(3)] == [2, 3, 4]
    journal.snapshot({"merge": 2}, TENSORS)
    journal.append({"merge": 3}, TENSORS)
    snapshot, records = Journal(store, 2).load()
    assert snapshot is not None
    assert torch.equal(snapshot.tensors["theta"], TENSORS["theta"])
    assert [(record.seq, record.meta) for record in records] == [(5, {"merge": 3})]
    assert torch.equal(records[0].tensors["theta"], TENSORS["theta"])


def test_a_replaced_writer_is_fenced(store: Store) -> None:
    old = opened(store)
    old.append({"merge": 0}, {})
    new = opened(store)
    assert new.epoch == old.epoch + 1
    for _ in range(2):
        with pytest.raises(Fenced):
            old.append({"merge": 99}, {})
    with pytest.raises(Fenced):
        old.snapshot({"merge": 99}, {})
    new.append({"merge": 1}, {})
    assert merges(store) == [0, 1]


def test_of_many_that_claim_at_once_each_has_an_epoch_of_its_own(busy_location: str) -> None:
    journals = [Journal(open_store(busy_location), 2) for _ in range(6)]
    start = threading.Barrier(len(journals))

    def claim(journal: Journal) -> None:
        start.wait()
        journal.claim_epoch()

    threads = [threading.Thread(target=claim, args=(journal,)) for journal in journals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(journal.epoch for journal in journals) == [1, 2, 3, 4, 5, 6]
    for journal in journals:
        if journal.epoch == 6:
            journal.append({"merge": 6}, {})
        else:
            with pytest.raises(Fenced):
                journal.append({"merge": journal.epoch}, {})
    assert merges(open_store(busy_location)) == [6]


@pytest.mark.parametrize("left", [0, 100, -5])
def test_a_torn_last_record_is_dropped_and_reported(left: int, store: Store) -> None:
    journal = opened(store)
    for i in range(3):
        journal.append({"merge": i}, TENSORS)
    last = store.names("journal/")[-1]
    store.write(last, store.read(last)[:left])
    writer = opened(store)
    assert writer.dropped == [last]
    writer.append({"merge": 7}, {})
    assert merges(store) == [0, 1, 7]


def test_damage_in_the_middle_is_an_error(store: Store) -> None:
    journal = opened(store)
    for i in range(4):
        journal.append({"merge": i}, {})
    store.delete(store.names("journal/")[2])
    with pytest.raises(JournalDamaged):
        Journal(store, 2).load()


def test_snapshots_remove_what_the_oldest_kept_one_covers(store: Store) -> None:
    journal = opened(store)
    for i in range(6):
        journal.append({"merge": i}, {})
        if i % 2 == 1:
            journal.snapshot({"merge": i}, {})
    assert store.names("snapshot-") == ["snapshot-000000000005.safetensors", "snapshot-000000000007.safetensors"]
    assert store.names("journal/") == ["journal/000000000006.safetensors", "journal/000000000007.safetensors"]
    store.write("snapshot-000000000007.safetensors", b"damaged")
    assert merges(store) == [3, 4, 5]


def test_an_answer_that_was_lost_on_its_way_changes_nothing(s3_location: str, s3: S3Server) -> None:
    """The upload arrived, its answer did not: whoever asks again hears that the name is taken."""
    store = open_store(s3_location)
    journal = opened(store)
    s3.losing = lambda method, path: method == "PUT" and "/journal/" in path
    with pytest.raises(OSError):
        journal.append({"merge": 4}, {})
    s3.well()
    journal.append({"merge": 5}, {})
    assert merges(store) == [5]


def test_a_store_that_is_away_adds_nothing_and_the_same_call_works_later(s3_location: str, s3: S3Server) -> None:
    store = open_store(s3_location)
    journal = opened(store)
    journal.append({"merge": 0}, {})
    with s3.away():
        for call in (journal.append, journal.snapshot):
            with pytest.raises(OSError):
                call({"merge": 99}, TENSORS)
        with pytest.raises(OSError):
            Journal(store, 2).claim_epoch()
    assert merges(store) == [0]
    journal.append({"merge": 1}, {})
    journal.snapshot({"merge": 1}, TENSORS)
    assert merges(store) == [1]
    assert opened(store).epoch == 2


def test_no_merge_is_lost_when_requests_fail_at_random(s3_location: str, s3: S3Server) -> None:
    """Every third request is answered with 500, whatever it is; who writes tries again, as the syncer does."""
    count = 0

    def failing(_method: str, _path: str) -> bool:
        nonlocal count
        count += 1
        return count % 3 == 0

    store = open_store(s3_location)
    journal = opened(store)
    s3.failing = failing
    for i in range(12):
        while True:
            try:
                journal.append({"merge": i}, TENSORS)
                if i == 5:
                    journal.snapshot({"merge": i}, TENSORS)
                break
            except OSError:
                continue
    s3.well()
    found = merges(store)
    assert found[-7:] == [5, 6, 7, 8, 9, 10, 11]


def test_a_folder_of_this_machine_needs_no_package(tmp_path: Path) -> None:
    journal = opened(open_store(tmp_path.as_uri()))
    journal.append({"merge": 0}, {})
    assert merges(open_store(str(tmp_path))) == [0]
