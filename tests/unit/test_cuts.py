"""Consistent cuts in a store: what is whole is found, what is not is passed over."""

import json
import logging

import pytest
import torch

from app.run.cuts import FOLDER, LEDGER, MANIFEST, SYNCER, Cuts, name_of
from app.run.record import RecordDamaged
from app.run.storage import LocalStore

LEARNERS = ("learner-0", "learner-1")


def made(store, number, keep=2):
    cuts, cut = Cuts(store), name_of((3, number))
    for part in (SYNCER, *LEARNERS):
        cuts.write(cut, part, {"part": part, "number": number}, {"x": torch.arange(5) + number})
    store.write(f"{FOLDER}{cut}/{LEDGER}", json.dumps({"number": number}).encode())
    cuts.complete(cut, LEARNERS, keep)
    return cut


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def test_a_cut_comes_back_as_it_was_saved(store):
    cut = made(store, 1)
    cuts = Cuts(store)
    assert cuts.newest() == cut
    assert cuts.learners(cut) == list(LEARNERS)
    for part in (SYNCER, *LEARNERS):
        found = cuts.part(cut, part)
        assert found.meta == {"part": part, "number": 1}
        assert found.tensors["x"].equal(torch.arange(5) + 1)
    assert json.loads(cuts.ledger(cut)) == {"number": 1}


def test_the_newest_ones_are_kept_and_what_was_never_completed_goes(store):
    made(store, 1)
    Cuts(store).write(name_of((3, 2)), SYNCER, {}, {})  # given up
    made(store, 3)
    made(store, 4)
    Cuts(store).write(name_of((3, 5)), SYNCER, {}, {})  # under way
    assert Cuts(store).newest() == name_of((3, 4))
    assert {name.split("/")[1] for name in store.names(FOLDER)} == {name_of((3, n)) for n in (3, 4, 5)}


def test_a_later_epoch_is_newer():
    assert sorted([name_of((10, 1)), name_of((9, 999))])[-1] == name_of((10, 1))


def test_what_is_none_of_ours_is_passed_over(store):
    store.write(f"{FOLDER}mine/{MANIFEST}", b"{}")
    store.write(f"{FOLDER}notes.txt", b"hands off")
    cut = made(store, 1, keep=1)
    made(store, 2, keep=1)
    assert Cuts(store).newest() == name_of((3, 2))
    assert cut not in "".join(store.names(FOLDER))
    assert store.read(f"{FOLDER}notes.txt") == b"hands off"
    assert store.exists(f"{FOLDER}mine/{MANIFEST}")


def damage(store, cut, what):
    path = store.root / FOLDER / cut
    match what:
        case "syncer flipped":
            data = bytearray((path / "syncer.safetensors").read_bytes())
            data[-3] ^= 1
            (path / "syncer.safetensors").write_bytes(data)
        case "learner cut short":
            (path / "learner-1.safetensors").write_bytes(b"short")
        case "learner gone":
            (path / "learner-0.safetensors").unlink()
        case "ledger garbled":
            (path / LEDGER).write_bytes(b"{" + (path / LEDGER).read_bytes()[1:-1] + b"?")
        case "manifest torn":
            (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:9])
        case "manifest of something else":
            (path / MANIFEST).write_bytes(b"[]")


@pytest.mark.parametrize(
    "what",
    [
        "syncer flipped",
        "learner cut short",
        "learner gone",
        "ledger garbled",
        "manifest torn",
        "manifest of something else",
    ],
)
def test_a_damaged_newest_falls_back_to_the_one_before_with_a_warning(store, caplog, what):
    before, newest = made(store, 1), made(store, 2)
    damage(store, newest, what)
    with caplog.at_level(logging.WARNING):
        assert Cuts(store).newest() == before
    assert f"cut {newest} is damaged and left out" in caplog.text


def test_where_all_are_damaged_there_is_none(store):
    damage(store, made(store, 1), "learner gone")
    assert Cuts(store).newest() is None
    assert Cuts(LocalStore(store.root / "nothing")).newest() is None


def test_a_part_of_a_learner_is_checked_when_it_is_read(store):
    cut = made(store, 1)
    path = store.root / FOLDER / cut / "learner-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert Cuts(store).newest() == cut
    with pytest.raises(RecordDamaged, match="checksum"):
        Cuts(store).part(cut, "learner-0")
