"""Experiment tracking beside the event tape: none, or Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from app.config import Config, ConfigError


class Tracker(ABC):
    """Takes figures as the run goes on. The x axis is always the global token count."""

    @abstractmethod
    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        """Note these figures at this many global tokens."""

    @abstractmethod
    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run's last figures; nothing can be logged after it."""


class NoTracker(Tracker):
    """Tracks nothing."""

    @override
    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        pass

    @override
    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


class WandbTracker(Tracker):
    """One W&B run. The id comes from the run's id, so a resumed run goes on in the same one.

    Offline, each start makes a folder of its own under `<folder>/wandb`; `wandb sync` puts them together by id.
    """

    def __init__(self, config: Config, run_id: str, folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)  # where it is missing, W&B quietly writes elsewhere
        tracking = config.tracking
        self._run = wandb.init(
            id=wandb_id(run_id),
            resume="allow",
            project=tracking.project,
            entity=tracking.entity,
            name=config.run.name,
            group=tracking.group or config.run.name,
            job_type="train",
            tags=tracking.tags,
            mode="online" if tracking.mode == "online" else "offline",
            dir=str(folder),
            config=dataclasses.asdict(config),
        )
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")

    @property
    def id(self) -> str:
        """The W&B id."""
        return str(self._run.id)

    @override
    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        self._run.log({"tokens": tokens, **values})

    @override
    def finish(self, summary: Mapping[str, Any]) -> None:
        import wandb

        self._run.summary.update(dict(summary))
        self._run.finish()
        wandb.teardown()  # its service process would outlive the run


def check_tracking(config: Config) -> None:
    """Refuse a tracker whose package isn't installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    if config.tracking.kind == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ConfigError("tracking.kind", "wandb", "the package wandb is needed: pip install wandb")


def open_tracker(config: Config, run_id: str, folder: Path) -> Tracker:
    """The tracker that `tracking.kind` names; W&B keeps its files under `<folder>/wandb`.

    Raises:
        ConfigError: the tracker's package isn't installed.
    """
    check_tracking(config)
    if config.tracking.kind == "wandb":
        return WandbTracker(config, run_id, folder)
    return NoTracker()


def wandb_id(run_id: str) -> str:
    """The run's id in the letters that W&B takes, at most 64 of them."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run_id)[:64]
