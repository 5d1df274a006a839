"""What the supervisor tells of the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.evaluator import Evaluation, FinalResult
from actors.learner import LearnerStatus
from actors.syncer_status import SyncerStatus


@dataclass(frozen=True)
class SupervisorStatus:
    """What the driver sees of the whole run."""

    attempt: str
    phase: str
    """starting, running, ending (evaluation and export) or done."""
    syncer: SyncerStatus | None
    """Newest answer; None before the first."""
    syncer_silent_s: float
    learners: dict[str, LearnerStatus]
    silent: tuple[str, ...]
    """Learners that do not answer now."""
    present: tuple[str, ...]
    """Learners that have a place, or that the run starts with."""
    evaluation: Evaluation | None
    final: FinalResult | None
    summary: dict[str, Any] | None
    error: str | None
