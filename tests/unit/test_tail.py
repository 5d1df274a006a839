"""Following a journal that another writes, in a real folder: compacted, torn, damaged and claimed under the reader."""

from pathlib import Path

import pytest
import torch

from app.run.journal import Fenced, Journal, JournalDamaged
from app.run.record import RecordDamaged
from app.run.storage import LocalStore
from app.run.tail import Tail


def journal(folder: Path, keep: int = 2) -> Journal:
    return Journal(LocalStore(folder), keep)


def writer(folder: Path, keep: int = 2) -> Journal:
    """A journal with a first snapshot (0) at sequence number 1, that of the claim."""
    made = journal(folder, keep)
    made.claim_epoch()
    made.snapshot({"n": 0}, {})
    return made


def add(to: Journal, *numbers: int) -> None:
    for n in numbers:
        to.append({"n": n}, {"theta": torch.full((3,), float(n))})


def look(tail: Tail, final: bool = False) -> tuple[int | None, list[int]]:
    """Number of the snapshot to start over from, and of the records."""
    news = tail.news(final=final)
    for record in news.records:
        assert record.tensors["theta"].equal(torch.full((3,), float(record.meta["n"])))
    return (news.base.meta["n"] if news.base else None), [record.meta["n"] for record in news.records]


def flip(folder: Path, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_each_record_is_read_once_when_another_follows_it(tmp_path: Path) -> None:
    made, tail = writer(tmp_path), Tail(journal(tmp_path))
    add(made, 1)
    assert look(tail) == (0, [])
    assert tail.newest == 2
    add(made, 2, 3)
    assert look(tail) == (None, [1, 2])
    assert look(tail) == (None, [])
    add(made, 4)
    assert look(tail) == (None, [3])
    assert look(tail, final=True) == (None, [4])
    assert look(tail, final=True) == (None, [])


def test_a_record_that_its_writer_puts_anew_is_read_as_it_is_in_the_end(tmp_path: Path) -> None:
    """The writer was told that its first try failed: what it writes next takes the place of what did arrive."""

    class Unsure(LocalStore):
        fails = False

        def create(self, name: str, data: bytes) -> None:
            super().create(name, data)
            if self.fails:
                raise OSError("no answer")

    store = Unsure(tmp_path)
    made, tail = Journal(store, 2), Tail(journal(tmp_path))
    made.claim_epoch()
    made.snapshot({"n": 0}, {})
    assert look(tail) == (0, [])
    store.fails = True
    with pytest.raises(OSError, match="no answer"):
        add(made, 1)
    assert look(tail) == (None, [])
    store.fails = False
    add(made, 2, 3)
    assert look(tail, final=True) == (None, [2, 3])


@pytest.mark.parametrize("keep", [1, 2])
def test_compacted_between_two_looks_it_starts_over_from_a_snapshot(tmp_path: Path, keep: int) -> None:
    made, tail = writer(tmp_path, keep), Tail(journal(tmp_path, keep))
    add(made, 1, 2)
    assert look(tail) == (0, [1])
    add(made, 3)
    made.snapshot({"n": 3}, {})
    add(made, 4)
    made.snapshot({"n": 4}, {})
    add(made, 5, 6)
    assert look(tail) == (4, [5])  # from the newest, though one before may still be there
    assert look(tail, final=True) == (None, [6])


def test_compacted_to_its_last_record_it_waits_for_what_comes_next(tmp_path: Path) -> None:
    made, tail = writer(tmp_path, keep=1), Tail(journal(tmp_path, 1))
    add(made, 1, 2)
    assert look(tail) == (0, [1])
    made.snapshot({"n": 2}, {})
    assert journal(tmp_path, 1).seqs() == []
    assert look(tail) == (None, [])
    add(made, 3, 4)
    assert look(tail) == (2, [3])


def test_compacted_during_a_look_it_is_tried_again(tmp_path: Path) -> None:
    made = writer(tmp_path, keep=1)
    add(made, 1, 2, 3)

    class Slow(LocalStore):
        def read(self, name: str) -> bytes:
            if name.startswith("journal") and self.exists("journal/000000000004.safetensors"):
                made.snapshot({"n": 3}, {})
            return super().read(name)

    tail = Tail(Journal(Slow(tmp_path), 1))
    with pytest.raises(FileNotFoundError):
        tail.news()
    add(made, 4, 5)
    assert look(tail) == (3, [4])


def test_a_torn_last_record_is_not_read_and_a_claim_takes_its_place(tmp_path: Path) -> None:
    made, tail = writer(tmp_path), Tail(journal(tmp_path))
    add(made, 1, 2)
    assert look(tail) == (0, [1])
    torn = tmp_path / "journal" / "000000000004.safetensors"
    torn.write_bytes((tmp_path / "journal" / "000000000003.safetensors").read_bytes()[:50])
    assert look(tail) == (None, [2])
    assert look(tail) == (None, [])
    later = journal(tmp_path)
    assert later.claim_epoch() == 2
    assert look(tail, final=True) == (None, [])
    add(later, 3, 4)
    assert look(tail) == (None, [3])


def test_a_torn_last_record_at_the_first_look_is_left_out(tmp_path: Path) -> None:
    made = writer(tmp_path)
    add(made, 1)
    (tmp_path / "journal" / "000000000003.safetensors").write_bytes(b"torn")
    assert look(Tail(journal(tmp_path))) == (0, [1])


def test_claims_are_no_records_but_a_sign_of_life(tmp_path: Path) -> None:
    made, tail = writer(tmp_path), Tail(journal(tmp_path))
    add(made, 1)
    look(tail)
    before = tail.newest
    later = journal(tmp_path)
    later.claim_epoch()
    assert look(tail) == (None, [1])
    assert tail.newest == before + 1
    add(later, 2, 3)
    assert look(tail) == (None, [2])
    with pytest.raises(Fenced):
        add(made, 4)


def test_a_damaged_snapshot_is_left_out_where_an_older_one_does(tmp_path: Path) -> None:
    made = writer(tmp_path)
    add(made, 1, 2)
    made.snapshot({"n": 2}, {})
    add(made, 3, 4)
    flip(tmp_path, "snapshot-000000000003.safetensors")
    assert look(Tail(journal(tmp_path))) == (0, [1, 2, 3])


def test_a_damaged_record_that_others_follow_stops_it_until_a_snapshot_has_it(tmp_path: Path) -> None:
    made, tail = writer(tmp_path), Tail(journal(tmp_path))
    add(made, 1)
    assert look(tail) == (0, [])
    add(made, 2, 3)
    flip(tmp_path, "journal/000000000003.safetensors")
    for _ in range(2):
        with pytest.raises(RecordDamaged):
            tail.news()
    with pytest.raises(JournalDamaged):
        Tail(journal(tmp_path)).news()
    made.snapshot({"n": 3}, {})
    add(made, 4, 5)
    assert look(Tail(journal(tmp_path))) == (3, [4])


def test_an_outlived_writer_is_fenced_though_the_claim_in_its_way_is_gone(tmp_path: Path) -> None:
    """Its successor has compacted its own claim away: the old writer's next place is free again."""
    old = writer(tmp_path)
    add(old, 1)
    new = journal(tmp_path)
    new.claim_epoch()
    for n in (2, 3, 4):
        add(new, n)
        new.snapshot({"n": n}, {})
    assert old.seq + 1 < min(new.seqs())
    before = sorted(path.name for path in tmp_path.rglob("*.*"))
    for attempt in (lambda: add(old, 9), lambda: old.snapshot({"n": 9}, {}), old.confirm):
        with pytest.raises(Fenced):
            attempt()
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == before
    new.confirm()
    add(new, 5)
    snapshot, records = journal(tmp_path).load()
    assert snapshot is not None
    assert [snapshot.meta["n"], *(record.meta["n"] for record in records)] == [4, 5]
