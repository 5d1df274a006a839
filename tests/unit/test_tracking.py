"""Tracking with real W&B, offline."""

import importlib.util
from pathlib import Path

import pytest

from app.config import ConfigError, load
from app.run.tracking import NoTracker, WandbTracker, check_tracking, open_tracker, wandb_id

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def test_none_tracks_nothing(tmp_path: Path) -> None:
    tracker = open_tracker(load([]), "run", tmp_path)
    assert isinstance(tracker, NoTracker)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_said_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_tracking(load(["tracking=wandb"]))
    check_tracking(load([]))


def test_ids_are_what_wandb_takes() -> None:
    assert wandb_id("main:2031/a b") == "main-2031-a-b"
    assert len(wandb_id("x" * 100)) == 64


@needs_wandb
def test_an_offline_run_and_its_resume_share_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    config = load(["tracking=wandb", "run.name=trial", "tracking.tags=[x]"])
    for tokens in (100, 200):
        tracker = open_tracker(config, "trial-1f00", tmp_path / "run")
        assert isinstance(tracker, WandbTracker)
        assert tracker.id == "trial-1f00"
        assert tracker._run.group == "trial"
        assert tracker._run.name == "trial"
        assert tracker._run.config["diloco"]["fragments"] == 8
        tracker.log(tokens, {"eval/loss": 3.0})
        tracker.finish({"status": "completed"})
    written = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-trial-1f00.wandb"))
    assert written
    content = b"".join(path.read_bytes() for path in written)
    assert b"eval/loss" in content
    assert b"tokens" in content
