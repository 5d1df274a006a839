"""What is known about a run when its summary is written: plain values that the actors fill in.

Times named `*_at` and intervals are unix times in seconds; durations end in `_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.diloco.accounts import Balance

STATUSES = ("completed", "stopped", "failed")


@dataclass(frozen=True)
class LearnerFacts:
    """One learner, all its incarnations together."""

    pool: str
    incarnations: int
    steps: int
    tokens: int
    step_s: float
    """Seconds spent inside inner steps."""
    allocated_s: float
    """Seconds for which its place was held, stepping or not."""
    stepping: tuple[tuple[float, float], ...]
    """Intervals in which it made steps, for uptime."""
    recoveries_s: tuple[float, ...]
    """Fault to first merged contribution, one for each recovery."""


@dataclass(frozen=True)
class SyncerFacts:
    """The syncer, all its incarnations together."""

    incarnations: int
    cpu_s: float
    merge_s: float
    """Seconds spent merging and publishing."""
    recoveries_s: tuple[float, ...]


@dataclass(frozen=True)
class ByteFacts:
    """Payload bytes between learners and syncer, and what fp32 would have taken for the same messages."""

    up: int
    down: int
    up_fp32: int
    down_fp32: int


@dataclass(frozen=True)
class MergeFacts:
    """One merge."""

    at: float
    contributors: int
    """Learners with work in it."""
    live: int
    """Learners that were live when its round opened."""


@dataclass(frozen=True)
class EvalFacts:
    """One evaluation of the global model."""

    tokens: int
    loss: float
    """Nats per token."""
    bits_per_byte: float


@dataclass(frozen=True)
class FaultFacts:
    """One fault, injected or real."""

    kind: str
    target: str
    at_s: float
    """Seconds since the start of the run."""
    recovered_s: float | None
    """Seconds from the fault to the first merged contribution (syncer: to the next merge); None if it never came."""


@dataclass(frozen=True)
class RunFacts:
    """Everything that the summary is made of."""

    status: str
    tokens_budget: int
    balance: Balance
    versions_made: int
    """Versions of all fragments together, one a merge. The tape may lack the line of one whose syncer died then."""
    merges: tuple[MergeFacts, ...]
    """Those on the tape."""
    global_step: int
    """The syncer's clock t."""
    evals: tuple[EvalFacts, ...]
    """Oldest first; the first is of the model before training, the last is the final one."""
    started_at: float
    first_step_at: float | None
    samples: dict[str, int] | None
    """The data ledger's account; None when it was not there at the end."""
    budget_at: float | None
    """When the budget was reached; None when it was not."""
    ended_at: float
    learners: dict[str, LearnerFacts]
    syncer: SyncerFacts
    bytes: ByteFacts
    faults: tuple[FaultFacts, ...]
    versions: dict[str, str]
