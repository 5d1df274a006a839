"""What every actor of a run is told, and under which names they find each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.preload import py_executable
from app.config import Config
from app.diloco.fragments import Layout
from app.run.folder import CHECKPOINTS, PAYLOADS, TAPE

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
    run_dir: Path
    """Absolute."""
    layout: Layout
    samples: int
    """Training samples in the prepared data."""

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
    def checkpoints(self) -> Path:
        """Journal and snapshots of the syncer, state of the ledger."""
        return self.run_dir / CHECKPOINTS

    @property
    def data(self) -> Path:
        """The prepared data set and its tokenizer."""
        return self.run_dir / "data"

    @property
    def tape(self) -> Path:
        """The event tape."""
        return self.run_dir / TAPE

    @property
    def payloads(self) -> Path:
        """What replay needs beside the tape."""
        return self.run_dir / PAYLOADS

    def group_name(self, learner: str) -> str:
        """Name of a learner's placement group. These names are not scoped by namespace."""
        return f"{self.namespace}/{learner}"


def namespace_of(run_id: str) -> str:
    """Ray namespace of a run."""
    return f"diloco-{run_id}"
