"""What may be in a run folder when a run starts."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from app.config import Config, ConfigError, from_yaml, load
from app.run.folder import open_folder
from app.run.journal import Journal


def config_for(folder: object, *overrides: str) -> Config:
    return load([f"run.dir={folder}", *overrides])


def with_checkpoint(config: Config) -> bytes:
    """Start a run, let it write a checkpoint, end it; its config.yaml."""
    folder = open_folder(config)
    folder.keep(config)
    journal = Journal(folder.checkpoints, 2)
    journal.claim_epoch()
    journal.append({"merge": 0}, {})
    if folder.lock:
        folder.lock.release()
    return folder.store.read("config.yaml")


def test_a_new_folder(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a" / "b")
    folder = open_folder(config)
    assert not folder.resumed
    assert folder.local == tmp_path / "a" / "b"
    assert folder / "model" == f"{tmp_path}/a/b/model"
    assert not (tmp_path / "a/b/config.yaml").exists()  # the start may still be refused
    folder.keep(config)
    assert from_yaml((tmp_path / "a/b/config.yaml").read_text()) == config
    assert folder.lock is not None
    folder.lock.release()
    assert open_folder(config_for(tmp_path / "a" / "b", "run.resume=auto")).run_id == folder.run_id


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = open_folder(load(["run.name=trial"]))
    assert folder.location == str(tmp_path / "runs" / "trial")


@pytest.mark.parametrize("override", ["run.name=trial", "run.dir=trial", "run.dir=./trial"])
def test_a_job_needs_an_absolute_folder(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(ConfigError, match=r"^run\.dir=.*trial is refused: .* absolute path or a file:// URL"):
        open_folder(load([override]))
    assert not list(tmp_path.iterdir())
    for location in (str(tmp_path / "a"), (tmp_path / "b c").as_uri()):
        assert open_folder(load([f"run.dir='{location}'"])).local.parent == tmp_path
    assert (tmp_path / "b c").is_dir()


def test_a_checkpoint_is_not_overwritten_without_resume(tmp_path: Path) -> None:
    before = with_checkpoint(config_for(tmp_path))
    with pytest.raises(ConfigError, match=r"run\.resume=auto") as refusal:
        open_folder(config_for(tmp_path, "learners=2"))
    assert str(refusal.value).startswith("run.dir=")
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert len(list((tmp_path / "checkpoints" / "journal").iterdir())) == 2
    assert open_folder(config_for(tmp_path, "run.resume=auto")).resumed  # the refusal left no lock behind


def test_resume_may_change_what_is_free_to_change(tmp_path: Path) -> None:
    with_checkpoint(config_for(tmp_path))
    folder = open_folder(config_for(tmp_path, "run.resume=auto", "learners=2", "train.tokens=5000000"))
    assert folder.resumed
    assert from_yaml(folder.store.read("config.yaml").decode()).learners == 4  # until the start is certain
    folder.keep(config_for(tmp_path, "run.resume=auto", "learners=2", "train.tokens=5000000"))
    assert from_yaml(folder.store.read("config.yaml").decode()).learners == 2


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.hidden=64", "model.hidden=64"),
        ("data.vocab=512", "data.vocab=512"),
        ("diloco.fragments=4", "diloco.fragments=4"),
        ("run.seed=2", "run.seed=2"),
    ],
)
def test_resume_refuses_what_the_checkpoint_is_built_on(override: str, key: str, tmp_path: Path) -> None:
    before = with_checkpoint(config_for(tmp_path))
    with pytest.raises(ConfigError, match="was started with") as refusal:
        open_folder(config_for(tmp_path, "run.resume=auto", override))
    assert str(refusal.value).startswith(key)
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_resume_of_an_empty_folder_is_a_new_run(tmp_path: Path) -> None:
    assert not open_folder(config_for(tmp_path, "run.resume=auto")).resumed


HOLDER = """
import sys
from app.config import load
from app.run.folder import open_folder
folder = open_folder(load([f"run.dir={sys.argv[1]}"]))
print("held", flush=True)
sys.stdin.read()
"""


def test_one_driver_at_a_time_and_a_kill_frees_the_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another run is at work"):
        open_folder(config_for(tmp_path))
    holder.kill()
    holder.communicate()
    assert open_folder(config_for(tmp_path)).lock is not None


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir="):
        open_folder(config_for(tmp_path / "file"))


def test_the_folder_of_a_url_needs_no_lock(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir="memory://folder-test/run"))
    try:
        with_checkpoint(config)
        with pytest.raises(ConfigError, match=r"run\.resume=auto"):
            open_folder(config)
        again = dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))
        folder = open_folder(again)
        assert folder.resumed
        assert folder.lock is None
        with pytest.raises(ValueError, match="not a folder of this machine"):
            _ = folder.local
    finally:
        fsspec.filesystem("memory").rm("/folder-test", recursive=True)
