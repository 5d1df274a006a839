"""What a start refuses once it is under way, without a cluster."""

import dataclasses
from pathlib import Path

import pytest

from actors.driver import prepare_run
from actors.start import went_back
from actors.waiting import LOOK_EVERY_S, Waits
from app.config import ConfigError, load
from app.run.cuts import FOLDER, LEDGER, SYNCER, Cuts, name_of
from app.run.folder import open_folder
from app.run.journal import Journal
from tests.small import SMALL


@pytest.mark.parametrize("name", ["data", "config.yaml/x", "checkpoints/journal"])
def test_a_folder_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    config = load([*SMALL, f"run.dir={tmp_path}"])
    folder = open_folder(config)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refusal:
        prepare_run(config, folder)
    assert str(refusal.value).startswith(f"run.dir={tmp_path} is refused: it can't be used: ")
    assert str(tmp_path / name.split("/")[0]) in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.seq_len=50000"], "data.seq_len"),
        (["model=hf", "model.path=."], "model.path"),
        (["data.tokenizer=."], "data.tokenizer"),
    ],
)
def test_text_model_and_tokenizer_are_refused_under_their_own_keys(
    overrides: list[str], key: str, tmp_path: Path
) -> None:
    config = load([*SMALL, f"run.dir={tmp_path}", *overrides])
    with pytest.raises(ConfigError) as refusal:
        prepare_run(config, open_folder(config))
    assert refusal.value.key == key


def test_a_changed_text_is_refused_on_resume(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 900)
    files = ["data=files", f"data.path={tmp_path}/a.txt"]
    config = load([*SMALL, *files, f"run.dir={tmp_path}/run"])
    folder = open_folder(config)
    prepare_run(config, folder)
    (tmp_path / "a.txt").write_text("other text " * 900)
    with pytest.raises(ConfigError, match=r"^data\.path=.*a\.txt is refused: the text has changed"):
        prepare_run(config, dataclasses.replace(folder, resumed=True))


def test_a_wait_is_told_once_when_it_has_lasted() -> None:
    looks = iter([["a"], ["a", "b"], ["b"], ["b"], ["a", "b"], ["a"]])
    waits = Waits(lambda: next(looks))
    told, still = [], []
    for look in range(6):
        now = 100.0 + look * LOOK_EVERY_S
        told.append(waits.news(now))
        still.append(waits.open)
        assert waits.news(now + LOOK_EVERY_S / 2) == []  # too early for another look
    assert told == [[], ["waiting for a"], ["waiting for b"], [], [], ["waiting for a"]]
    assert still == [[], ["a"], ["b"], ["b"], ["b"], ["a"]]


def test_a_journal_that_is_damaged_in_the_middle_is_refused_and_a_cut_does_without_it(tmp_path: Path) -> None:
    same = [*SMALL, f"run.dir={tmp_path}"]
    config = load(same)
    folder = open_folder(config)
    spec = prepare_run(config, folder)
    store = folder.checkpoints
    journal, cuts = Journal(store, 2), Cuts(store)
    journal.claim_epoch()
    first = journal.load()[0]
    assert first is not None
    cut = name_of((journal.epoch, 1))
    cuts.write(cut, SYNCER, first.meta, first.tensors)
    store.write(f"{FOLDER}{cut}/{LEDGER}", b"{}")
    cuts.complete(cut, [], 2)
    for _ in range(3):
        journal.append({"kind": "join"}, {})
    middle = store.names("journal/")[-2]
    store.write(middle, b"garbled")
    folder.lock.release()

    again = open_folder(load([*same, "run.resume=auto"]))
    with pytest.raises(ConfigError, match=rf"its checkpoint can't be used: {middle}: not a record"):
        prepare_run(load([*same, "run.resume=auto"]), again, lambda _: None)
    again.lock.release()

    back = load([*same, "run.resume=cut"])
    again = open_folder(back)
    gone = went_back(prepare_run(back, again, lambda _: None), again)
    assert (gone.cut, gone.rolled_back) == (cut, True)
    state, later = Journal(store, 2).load()
    assert state is not None
    assert (state.meta, later) == (first.meta, [])
    assert all(state.tensors[name].equal(tensor) for name, tensor in first.tensors.items())
    assert spec.layout.hash == gone.layout.hash
    again.lock.release()
