"""What every actor of a run is told, and under which names they find each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.preload import py_executable
from app.config import Config
from app.diloco.fragments import Layout
from app.run.folder import CHECKPOINTS, DATA, PAYLOADS, TAPE, work_dir_of
from app.run.mirror import download
from app.run.remote import patiently
from app.run.storage import local_path, open_store

SYNCER = "syncer"
STANDBY = "syncer-standby"
"""The second of a run's two syncers, where it has two; either may lead."""
SUPERVISOR = "supervisor"
LEDGER = "ledger"
EVALUATOR = "evaluator"
RENDEZVOUS = "rendezvous"


@dataclass(frozen=True)
class RunSpec:
    """One run, as plain values that travel to every actor."""

    run_id: str
    config: Config
    location: str
    """The run folder: an absolute path or a URL."""
    layout: Layout
    samples: int
    """Training samples in the prepared data."""
    data_digest: str = ""
    """Of the prepared data in the store, where the run folder is a URL."""
    cut: str | None = None
    """The newest consistent cut when the run was resumed: where learners find their optimizer state."""
    rolled_back: bool = False
    """The run goes on from that cut, learners as they were, and not from the journal's end."""

    @property
    def namespace(self) -> str:
        """Ray namespace that holds the run's named actors."""
        return namespace_of(self.run_id)

    @property
    def syncers(self) -> tuple[str, ...]:
        """Names of the actors of which one leads."""
        return (SYNCER, STANDBY) if self.config.syncer.standby else (SYNCER,)

    @property
    def process(self) -> dict[str, Any]:
        """Options of every actor that say how its process starts."""
        return {"runtime_env": {"py_executable": py_executable()}} if self.config.run.preload else {}

    @property
    def is_local(self) -> bool:
        """Whether the run folder is one of this machine's file system."""
        return local_path(self.location) is not None

    @property
    def work_dir(self) -> Path:
        """Folder of this machine for what needs a path: the run folder itself, unless that is a URL."""
        return work_dir_of(self.location, self.config.run.cache_dir)

    @property
    def checkpoints(self) -> str:
        """Journal and snapshots of the syncer, state of the ledger."""
        return f"{self.location}/{CHECKPOINTS}"

    @property
    def data(self) -> Path:
        """The prepared data set and its tokenizer, on this machine once `fetch_data` was called."""
        return self.work_dir / DATA

    @property
    def tape(self) -> str:
        """The event tape."""
        return f"{self.location}/{TAPE}"

    @property
    def spool(self) -> Path:
        """Folder of this machine for events on their way to a tape in a store."""
        return self.work_dir / "spool" / self.run_id

    @property
    def payloads(self) -> str:
        """What replay needs beside the tape."""
        return f"{self.location}/{PAYLOADS}"

    def fetch_data(self) -> Path:
        """The folder `data`, fetched from the store unless this machine has it. A store that is away is waited for."""
        if not self.is_local:
            patiently(lambda: download(open_store(self.location), DATA, self.data, self.data_digest))
        return self.data

    def group_name(self, learner: str) -> str:
        """Name of a learner's placement group. These names are not scoped by namespace."""
        return f"{self.namespace}/{learner}"


def namespace_of(run_id: str) -> str:
    """Ray namespace of a run."""
    return f"diloco-{run_id}"
