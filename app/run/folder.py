"""The run folder: what may be in it when a run starts, one driver at a time, and where everything lies."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.config import Config, ConfigError, as_yaml, from_yaml
from app.run.storage import Store, open_store

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
PAYLOADS = "payloads"
TAPE = "events.jsonl"
RUN = "run.json"
IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for whatever `ray job submit` runs."""

_RUN_ID = re.compile(r"[^/\\\x00-\x1f]{1,300}")
"""A name of a run, which has no slashes, and what makes it unique."""
_FIXED = ("model", "data", "diloco.fragments", "run.seed")
"""Sections and keys that the checkpoint is built on."""


class Lock:
    """A lock on a folder of this machine, held until `release` or the death of the process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: another process holds it.
        """
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Give the lock back; a second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder."""

    location: str
    """Absolute path or URL."""
    store: Store
    """The folder's own files: config.yaml, summary.json."""
    checkpoints: Store
    """The syncer's journal and snapshots."""
    run_id: str
    """Made once and kept with the checkpoints, so that a resumed run is the same run."""
    resumed: bool
    """There was a checkpoint, and the run goes on from it."""
    lock: Lock | None
    """None where the folder is not on this machine's file system."""

    @property
    def local(self) -> Path:
        """The folder as a path of this machine.

        Raises:
            ValueError: it is a URL of some other store.
        """
        path = local_path(self.location)
        if path is None:
            raise ValueError(f"{self.location} is not a folder of this machine")
        return path

    def keep(self, config: Config) -> None:
        """Write down the configuration and the run's id, once nothing can refuse the start any more."""
        self.store.write(CONFIG, as_yaml(config).encode())
        self.checkpoints.write(RUN, json.dumps({"run_id": self.run_id}).encode())

    def kept(self) -> Config:
        """The configuration that was written down: the one of the run that lives in it, if there is one."""
        return _kept_config(self.store, self.location)

    def __truediv__(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}"


def _is_absolute(location: str) -> bool:
    return "://" in location or Path(location).expanduser().is_absolute()


def local_path(location: str) -> Path | None:
    """The absolute path of a location on this machine's file system, None for any other URL."""
    if "://" not in location:
        return Path(location).expanduser().absolute()
    url = urlsplit(location)
    return Path(unquote(url.path)) if url.scheme == "file" else None


def open_folder(config: Config) -> RunFolder:
    """Make or reopen the run folder and take its lock. Nothing that was there is changed.

    Raises:
        ConfigError: another driver runs in it; it holds a checkpoint and `run.resume` is never; it was started with
            settings that can't change; it can't be made; it is relative, in a Ray job, which would lose it.
    """
    if IN_JOB in os.environ and not _is_absolute(config.run.path):
        raise ConfigError("run.dir", config.run.path, "in a Ray job an absolute path or a file:// URL is needed")
    path = local_path(config.run.path)
    lock = _locked(config, path) if path is not None else None
    location = str(path) if path is not None else config.run.path
    store = open_store(location)
    checkpoints = open_store(f"{location.rstrip('/')}/{CHECKPOINTS}")
    try:
        resumed = bool(checkpoints.names(""))
        if resumed:
            _check_resume(config, store)
        run_id = _run_id(checkpoints, config) if resumed else f"{config.run.name}-{uuid.uuid4().hex[:8]}"
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, OSError):
            raise ConfigError("run.dir", config.run.path, f"it can't be used: {error}") from error
        raise
    return RunFolder(location, store, checkpoints, run_id, resumed, lock)


def _run_id(checkpoints: Store, config: Config) -> str:
    """The id that the run in it was given."""
    try:
        run_id = json.loads(checkpoints.text(RUN))["run_id"]
    except FileNotFoundError:
        raise ConfigError("run.dir", config.run.path, f"it holds a checkpoint but no {CHECKPOINTS}/{RUN}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(config.run.path, f"{CHECKPOINTS}/{RUN}", error) from error
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise _damaged(config.run.path, f"{CHECKPOINTS}/{RUN}", "no id of a run is in it")
    return run_id


def _kept_config(store: Store, location: str) -> Config:
    try:
        return from_yaml(store.text(CONFIG))
    except FileNotFoundError:
        raise ConfigError("run.dir", location, f"it holds a checkpoint but no {CONFIG}") from None
    except ValueError as error:  # that of a wrong key or type is one
        raise _damaged(location, CONFIG, error) from error


def _damaged(location: str, name: str, why: object) -> ConfigError:
    return ConfigError("run.dir", location, f"{name} in it is damaged: {why}")


def _locked(config: Config, path: Path) -> Lock:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return Lock(path)
    except BlockingIOError:
        raise ConfigError("run.dir", config.run.path, "another run is at work in it; one at a time") from None
    except OSError as error:
        raise ConfigError("run.dir", config.run.path, f"it can't be used: {error}") from error


def _check_resume(config: Config, store: Store) -> None:
    if config.run.resume == "never":
        allowed = "it holds a checkpoint; run.resume=auto goes on from it, run.name or run.dir start another"
        raise ConfigError("run.dir", config.run.path, allowed)
    before = _fixed(_kept_config(store, config.run.path))
    for key, value in _fixed(config).items():
        if value != before[key]:
            raise ConfigError(key, value, f"the run in {config.run.path} was started with {before[key]}")


def _fixed(config: Config) -> dict[str, object]:
    """The values that may not change on resume, by dotted key."""
    values: dict[str, object] = {}
    for name in _FIXED:
        node: object = config
        for part in name.split("."):
            node = getattr(node, part)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            values |= {f"{name}.{field.name}": getattr(node, field.name) for field in dataclasses.fields(node)}
        else:
            values[name] = node
    return values
