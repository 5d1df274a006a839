"""What a start refuses once it is under way, without a cluster."""

import dataclasses
from pathlib import Path

import pytest

from actors.driver import prepare_run
from actors.waiting import LOOK_EVERY_S, Waits
from app.config import ConfigError, load
from app.run.folder import open_folder
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
