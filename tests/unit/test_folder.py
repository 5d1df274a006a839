"""What may be in a run folder when a run starts."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from app.config import Config, ConfigError, from_yaml, load
from app.run.folder import open_folder, work_dir_of
from app.run.journal import Journal
from app.run.mirror import upload
from app.run.storage import open_store
from tests.s3 import S3Server


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
    assert folder.work_dir == tmp_path / "a" / "b"
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
    with pytest.raises(ConfigError, match=r"^run\.dir=.*trial is refused: .* absolute path or a URL"):
        open_folder(load([override]))
    assert not list(tmp_path.iterdir())
    for location in (str(tmp_path / "a"), (tmp_path / "b c").as_uri()):
        assert open_folder(load([f"run.dir='{location}'"])).work_dir.parent == tmp_path
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


def at(location: str, **run: object) -> Config:
    """A configuration whose folder is in any store, also one that `load` would refuse."""
    config = load([])
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=location, **run))


def test_a_folder_in_a_store_is_held_refused_and_resumed_as_any(far_location: str, tmp_path: Path) -> None:
    config = at(far_location, cache_dir=str(tmp_path))
    with_checkpoint(config)
    names = open_store(far_location).names("checkpoints/")
    with pytest.raises(ConfigError, match=r"run\.resume=auto"):
        open_folder(config)
    assert open_store(far_location).names("checkpoints/") == names
    told: list[str] = []
    again = at(far_location, cache_dir=str(tmp_path), resume="auto")
    folder = open_folder(again, told.append)
    assert told == []  # what was refused gave the lease back
    assert folder.resumed
    assert not folder.is_local
    assert folder.work_dir.parent == tmp_path
    with pytest.raises(ConfigError, match="another run is at work"):
        open_folder(again, told.append)
    assert len(told) == 1
    folder.lock.release()


def test_two_folders_of_a_store_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = work_dir_of("s3://bucket/one", None), work_dir_of("s3://bucket/two", None)
    assert one != two
    assert one.parent == two.parent == tmp_path / "decoupled-diloco"
    assert work_dir_of("s3://bucket/one", "/elsewhere").parent == Path("/elsewhere")
    assert work_dir_of("/runs/one", "/elsewhere") == Path("/runs/one")


def test_a_model_in_a_store_is_there_once_it_is_whole(far_location: str, tmp_path: Path) -> None:
    folder = open_folder(at(far_location, cache_dir=str(tmp_path)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folder.store.write("model/config.json", b"{}")
    assert not folder.has_model()
    upload(tmp_path / "model", folder.store, "model")
    assert folder.has_model()
    folder.lock.release()


@pytest.mark.parametrize("url", ["s3://no-such-bucket/run", "s3://", "http://127.0.0.1:9/run"])
def test_a_store_that_cannot_be_used_is_refused_in_one_line(url: str, s3: S3Server) -> None:
    with pytest.raises(ConfigError) as refusal:
        open_folder(at(url))
    assert str(refusal.value).startswith(f"run.dir={url} is refused: it can't be used: ")


def test_a_store_that_is_away_is_refused(s3_location: str, s3: S3Server) -> None:
    with s3.away(), pytest.raises(ConfigError, match=r"it can't be used: .*connect"):
        open_folder(at(s3_location))


def test_a_store_where_two_may_create_one_name_is_refused(s3_location: str, s3: S3Server) -> None:
    s3.careless = True
    with pytest.raises(ConfigError, match="not safe there"):
        open_folder(at(s3_location))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match="gcsfs"):
        open_folder(at("gs://bucket/run"))
