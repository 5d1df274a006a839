"""The journal against real faults: torn and garbled files, a full disk, a kill in the middle, two writers."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.run.journal import Fenced, Journal, JournalDamaged
from app.run.record import Record, RecordDamaged, decode, encode
from app.run.storage import LocalStore, Store, open_store

TENSORS = {"theta": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(7), "none": torch.zeros(0)}


def opened(store: Store, keep: int = 2) -> Journal:
    journal = Journal(store, keep)
    journal.claim_epoch()
    return journal


def filled(root: Path, count: int) -> Journal:
    journal = opened(LocalStore(root))
    for i in range(count):
        journal.append({"merge": i}, {"theta": torch.full((4,), float(i))})
    return journal


def merges(root: Path) -> list[int]:
    snapshot, records = Journal(LocalStore(root), 2).load()
    first = [snapshot.meta["merge"]] if snapshot else []
    return first + [record.meta["merge"] for record in records]


def record_files(root: Path) -> list[Path]:
    return sorted((root / "journal").glob("*.safetensors"))


def flip_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_a_record_survives_the_trip() -> None:
    tensors = TENSORS | {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "view": torch.ones(4, 4).T[1:],
    }
    record = Record(3, 2, "w", False, {"a": [1, {"b": None}], "x": 0.1}, tensors)
    back = decode(encode(record))
    assert back.meta == record.meta
    assert (back.seq, back.epoch, back.writer, back.claim) == (3, 2, "w", False)
    for name, tensor in tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert torch.equal(back.tensors[name], tensor)


def test_every_flipped_byte_of_a_record_is_noticed() -> None:
    data = encode(Record(1, 1, "w", False, {"merge": 1}, {"theta": torch.arange(3.0)}))
    for place in range(len(data)):
        garbled = bytearray(data)
        garbled[place] ^= 0x40
        try:
            back = decode(bytes(garbled))
        except RecordDamaged:
            continue
        # Only the blanks that pad the header may change without changing the record.
        assert data[place] == ord(" "), place
        assert torch.equal(back.tensors["theta"], torch.arange(3.0))


def test_every_truncation_of_a_record_is_noticed() -> None:
    data = encode(Record(1, 1, "w", False, {}, {"theta": torch.arange(3.0)}))
    for size in range(len(data)):
        with pytest.raises(RecordDamaged):
            decode(data[:size])


@pytest.mark.parametrize("location", ["local", "memory://journal-test"])
def test_append_snapshot_load(location: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path) if location == "local" else location)
    journal = opened(store)
    assert journal.epoch == 1
    assert [journal.append({"merge": i}, TENSORS) for i in range(3)] == [2, 3, 4]
    journal.snapshot({"merge": 2, "state": "all"}, TENSORS)
    journal.append({"merge": 3}, {})
    snapshot, records = Journal(store, 2).load()
    assert snapshot is not None
    assert snapshot.meta == {"merge": 2, "state": "all"}
    assert torch.equal(snapshot.tensors["theta"], TENSORS["theta"])
    assert [(r.seq, r.meta) for r in records] == [(5, {"merge": 3})]


def test_an_empty_journal_loads_as_nothing(tmp_path: Path) -> None:
    assert Journal(LocalStore(tmp_path), 2).load() == (None, [])


def test_snapshots_remove_what_the_oldest_kept_one_covers(tmp_path: Path) -> None:
    journal = opened(LocalStore(tmp_path), keep=2)
    for i in range(6):
        journal.append({"merge": i}, {})
        if i % 2 == 1:
            journal.snapshot({"merge": i}, {})
    names = LocalStore(tmp_path).names("")
    assert [n for n in names if n.startswith("snapshot")] == [
        "snapshot-000000000005.safetensors",
        "snapshot-000000000007.safetensors",
    ]
    assert [path.stem for path in record_files(tmp_path)] == ["000000000006", "000000000007"]


def test_nothing_is_written_without_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="epoch"):
        Journal(LocalStore(tmp_path), 2).append({}, {})
    with pytest.raises(ValueError, match="epoch"):
        Journal(LocalStore(tmp_path), 2).snapshot({}, {})


def test_a_replaced_writer_is_fenced(tmp_path: Path) -> None:
    old = filled(tmp_path, 2)
    new = opened(LocalStore(tmp_path))
    assert new.epoch == old.epoch + 1
    for _ in range(2):
        with pytest.raises(Fenced):
            old.append({"merge": 99}, {})
    with pytest.raises(Fenced):
        old.snapshot({"merge": 99}, {})
    new.append({"merge": 2}, {})
    assert merges(tmp_path) == [0, 1, 2]


def test_epochs_rise_across_snapshots(tmp_path: Path) -> None:
    for epoch in range(1, 5):
        journal = Journal(LocalStore(tmp_path), keep=1)
        assert journal.claim_epoch() == epoch
        journal.snapshot({"merge": epoch}, {})
    assert record_files(tmp_path) == []
    assert opened(LocalStore(tmp_path)).epoch == 5


def test_of_two_writers_at_once_one_publishes(tmp_path: Path) -> None:
    """Both hold the same place in the journal; only one may fill it."""
    one = opened(LocalStore(tmp_path))
    two = opened(LocalStore(tmp_path))
    two._seq = one.seq  # as if it had claimed at the same moment
    one.epoch, one._seq = two.epoch, two.seq
    LocalStore(tmp_path).delete("journal/000000000002.safetensors")
    one.append({"merge": 1}, {})
    with pytest.raises(Fenced):
        two.append({"merge": 2}, {})
    assert merges(tmp_path) == [1]


@pytest.mark.parametrize("fault", ["cut", "empty", "flip"])
def test_a_torn_last_record_is_dropped_and_reported(fault: str, tmp_path: Path) -> None:
    filled(tmp_path, 3)
    last = record_files(tmp_path)[-1]
    if fault == "flip":
        flip_byte(last, -3)
    else:
        os.truncate(last, 0 if fault == "empty" else last.stat().st_size - 5)
    reader = Journal(LocalStore(tmp_path), 2)
    _, records = reader.load()
    assert [r.meta["merge"] for r in records] == [0, 1]
    assert reader.dropped == [f"journal/{last.name}"]
    writer = opened(LocalStore(tmp_path))
    assert writer.dropped == [f"journal/{last.name}"]
    assert writer.epoch == 2
    writer.append({"merge": 7}, {})
    assert merges(tmp_path) == [0, 1, 7]


@pytest.mark.parametrize("fault", ["flip", "missing"])
def test_damage_in_the_middle_is_an_error(fault: str, tmp_path: Path) -> None:
    filled(tmp_path, 4)
    middle = record_files(tmp_path)[2]
    if fault == "flip":
        flip_byte(middle, -3)
    else:
        middle.unlink()
    with pytest.raises(JournalDamaged, match=middle.name):
        Journal(LocalStore(tmp_path), 2).load()


@pytest.mark.parametrize("fault", ["flip", "missing"])
def test_a_damaged_newest_snapshot_falls_back(fault: str, tmp_path: Path) -> None:
    journal = opened(LocalStore(tmp_path))
    for i in range(6):
        journal.append({"merge": i}, {})
        if i in (1, 3):
            journal.snapshot({"merge": i}, TENSORS)
    newest = sorted(tmp_path.glob("snapshot-*"))[-1]
    if fault == "flip":
        flip_byte(newest, -3)
    else:
        newest.unlink()
    assert merges(tmp_path) == [1, 2, 3, 4, 5]
    reader = Journal(LocalStore(tmp_path), 2)
    reader.load()
    assert reader.dropped == [newest.name]


def test_no_usable_snapshot_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    journal = opened(LocalStore(tmp_path), keep=1)
    journal.append({"merge": 0}, {})
    journal.snapshot({"merge": 0}, TENSORS)
    flip_byte(next(tmp_path.glob("snapshot-*")), -3)
    with pytest.raises(JournalDamaged):
        Journal(LocalStore(tmp_path), 1).load()
    with pytest.raises(JournalDamaged):
        Journal(LocalStore(tmp_path), 1).claim_epoch()


@pytest.mark.parametrize("pointer", [None, b"", b"{", b"[]", b'{"snapshot": "../snapshot-9.safetensors"}'])
def test_a_lost_or_wrong_pointer_costs_nothing(pointer: bytes | None, tmp_path: Path) -> None:
    journal = filled(tmp_path, 2)
    journal.snapshot({"merge": 1}, {})
    if pointer is None:
        (tmp_path / "latest.json").unlink()
    else:
        (tmp_path / "latest.json").write_bytes(pointer)
    journal.append({"merge": 2}, {})
    assert merges(tmp_path) == [1, 2]


def test_an_old_pointer_whose_records_are_gone_is_passed_over(tmp_path: Path) -> None:
    journal = opened(LocalStore(tmp_path), keep=2)
    pointers = []
    for i in range(3):
        journal.append({"merge": i}, {})
        journal.snapshot({"merge": i}, {})
        pointers.append((tmp_path / "latest.json").read_bytes())
    journal.append({"merge": 3}, {})
    (tmp_path / "journal" / "000000000004.safetensors").unlink()  # a record between the two kept snapshots
    (tmp_path / "latest.json").write_bytes(pointers[1])
    assert merges(tmp_path) == [2, 3]


def test_a_write_that_failed_but_arrived_can_be_made_again(tmp_path: Path) -> None:
    journal = filled(tmp_path, 1)
    seq = journal.append({"merge": 50}, {})
    journal._seq = seq - 1  # as after an upload whose answer was lost
    assert journal.append({"merge": 1}, {}) == seq
    assert merges(tmp_path) == [0, 1]


def test_a_disk_that_refuses_pauses_and_goes_on(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_append_on_a_full_disk, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert merges(tmp_path) == [0, 1]


def _append_on_a_full_disk(root: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = filled(root, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))
    for write in (journal.append, journal.append, journal.snapshot):
        with pytest.raises(OSError):
            write({"merge": 66}, {"theta": torch.zeros(10_000)})
    assert merges(root) == [0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append({"merge": 1}, {"theta": torch.zeros(10_000)})


WRITER = """
import sys, torch
from pathlib import Path
from app.run.journal import Journal
from app.run.storage import LocalStore
journal = Journal(LocalStore(Path(sys.argv[1])), 2)
journal.claim_epoch()
snapshot, records = journal.load()
merge = ([snapshot] if snapshot else []) + records
merge = merge[-1].meta["merge"] + 1 if merge else 0
while True:
    journal.append({"merge": merge}, {"theta": torch.full((5000,), float(merge))})
    if merge % 7 == 6:
        journal.snapshot({"merge": merge}, {"theta": torch.full((50000,), float(merge))})
    print(merge, flush=True)
    merge += 1
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_reported(tmp_path: Path) -> None:
    """Three writers, each killed with SIGKILL while it appends; what each reported as durable is there."""
    for stop_at in (5, 17, 40):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        reported = -1
        while reported < stop_at:
            reported = int(child.stdout.readline())
        child.kill()
        reported = max([reported, *map(int, child.stdout.read().split())])
        child.wait()
        found = merges(tmp_path)
        assert found == list(range(found[0], found[-1] + 1))
        assert found[-1] - reported in (0, 1)  # one more may have become durable before it was reported
        _, records = Journal(LocalStore(tmp_path), 2).load()
        assert all(torch.equal(r.tensors["theta"], torch.full((5000,), float(r.meta["merge"]))) for r in records)
