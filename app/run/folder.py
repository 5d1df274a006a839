"""The run folder: what may be in it when a run starts, one driver at a time, and where everything lies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.config import Config, ConfigError, as_yaml, from_yaml
from app.config.location import IN_JOB, check_in_job
from app.run.lease import Lease, Lock
from app.run.mirror import is_complete
from app.run.remote import RemoteStore
from app.run.storage import Store, local_path, open_store

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
DATA = "data"
MODEL = "model"
PAYLOADS = "payloads"
TAPE = "events.jsonl"
RUN = "run.json"

_RUN_ID = re.compile(r"[^/\\\x00-\x1f]{1,300}")
"""A name of a run, which has no slashes, and what makes it unique."""
_FIXED = ("model", "data", "diloco.fragments", "run.seed")
"""Sections and keys that the checkpoint is built on."""


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
    lock: Lock | Lease
    """Held as long as this driver is at work."""
    work_dir: Path
    """The folder as a path of this machine; of a URL: where this machine keeps what needs a path."""

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine's file system."""
        return local_path(self.location) is not None

    def has_model(self) -> bool:
        """Whether the trained model is there, whole."""
        return (self.work_dir / MODEL).is_dir() if self.is_local else is_complete(self.store, MODEL)

    def keep(self, config: Config) -> None:
        """Write down the configuration and the run's id, once nothing can refuse the start any more."""
        self.store.write(CONFIG, as_yaml(config).encode())
        self.checkpoints.write(RUN, json.dumps({"run_id": self.run_id}).encode())

    def kept(self) -> Config:
        """The configuration that was written down: the one of the run that lives in it, if there is one."""
        return _kept_config(self.store, self.location)

    def __truediv__(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}"


def work_dir_of(location: str, cache_dir: str | None) -> Path:
    """Folder of this machine for what a run needs as files: the run folder itself, or of a URL one of `cache_dir`."""
    path = local_path(location)
    if path is not None:
        return path
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "decoupled-diloco"
    root = Path(cache_dir) if cache_dir is not None else default
    return root.expanduser() / hashlib.sha256(location.encode()).hexdigest()[:16]


def open_folder(config: Config, tell: Callable[[str], None] = lambda _: None) -> RunFolder:
    """Make or reopen the run folder and take its lock. Nothing that was there is changed. `tell` hears of a wait.

    Raises:
        ConfigError: another driver runs in it; it holds a checkpoint and `run.resume` is never; it was started with
            settings that can't change; it can't be made or is away; it is relative, in a Ray job, which would lose it.
    """
    if IN_JOB in os.environ:
        check_in_job(config.run)
    path = local_path(config.run.path)
    location = str(path) if path is not None else _without_end(config.run.path)
    lock: Lock | Lease | None = None
    try:
        store = open_store(location)
        checkpoints = open_store(f"{location}/{CHECKPOINTS}")
        lock = _locked(path, store, tell)
        resumed = bool(checkpoints.names(""))
        if resumed:
            _check_resume(config, store)
        run_id = _run_id(checkpoints, config.run.path) if resumed else f"{config.run.name}-{uuid.uuid4().hex[:8]}"
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, BlockingIOError):
            raise ConfigError("run.dir", config.run.path, "another run is at work in it; one at a time") from None
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, OSError | ValueError | ImportError):
            raise ConfigError("run.dir", config.run.path, f"it can't be used: {error}") from error
        raise
    return RunFolder(location, store, checkpoints, run_id, resumed, lock, work_dir_of(location, config.run.cache_dir))


def _without_end(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def _locked(path: Path | None, store: Store, tell: Callable[[str], None]) -> Lock | Lease:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        return Lock(path)
    if isinstance(store, RemoteStore):
        store.check_exclusive()
    return Lease(store, tell=tell)


def run_id_in(location: str) -> str:
    """Id of the run that lies there. Raises ConfigError: there is none, or it can't be read."""
    try:
        checkpoints = open_store(f"{location.rstrip('/')}/{CHECKPOINTS}")
        if RUN not in checkpoints.names(RUN):
            raise ConfigError("run.dir", location, "no run was started in it")
        return _run_id(checkpoints, location)
    except (OSError, ImportError) as error:
        raise ConfigError("run.dir", location, f"it can't be used: {error}") from error


def _run_id(checkpoints: Store, location: str) -> str:
    """The id that the run in it was given."""
    try:
        run_id = json.loads(checkpoints.text(RUN))["run_id"]
    except FileNotFoundError:
        raise ConfigError("run.dir", location, f"it holds a checkpoint but no {CHECKPOINTS}/{RUN}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(location, f"{CHECKPOINTS}/{RUN}", error) from error
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise _damaged(location, f"{CHECKPOINTS}/{RUN}", "no id of a run is in it")
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
