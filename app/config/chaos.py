"""The `chaos` group: faults that a run does to itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from app.config.rules import at_least, between, one_of

LEARNER_FAULTS = ("kill", "kill_worker", "freeze", "slow", "mute", "corrupt", "preempt", "kill_node")
"""Faults that strike one learner: `target` names it, or any one that is well is struck."""
FAULT_KINDS = (
    *LEARNER_FAULTS,
    "kill_site",
    "kill_syncer",
    "freeze_syncer",
    "kill_supervisor",
    "kill_ledger",
    "fill_disk",
)
CORRUPTIONS = ("flip", "nan", "shape", "version", "ahead", "replay")


@dataclass(frozen=True)
class Fault:
    """One fault that the run does to itself."""

    kind: str = "kill"
    """kill and kill_worker (SIGKILL of a learner's process, or of one of its workers), freeze (SIGSTOP, later SIGCONT),
    slow, mute (its messages are lost both ways), corrupt (its contributions are garbage), preempt (SIGTERM, later
    SIGKILL), kill_site (all learners of a pool or of nodes with a label, kept away), kill_node (the raylet and all on
    it), kill_syncer, freeze_syncer, kill_supervisor, kill_ledger or fill_disk (nothing can be journaled)."""
    target: str = ""
    """The learner it strikes, for example learner-1; empty: any one. For kill_site a pool's name or label=value."""
    at: float = 0.4
    """When: share of the token budget that has been processed, 0 to 1."""
    at_s: float | None = None
    """When instead: seconds after the first merge."""
    seconds: float = 20.0
    """How long it lasts; for preempt from notice to death."""
    factor: float = 3.0
    """For slow: how many times as long everything takes."""
    how: str = ""
    """For corrupt: flip (a bit), nan, shape, version (one that is nowhere), ahead (a version that it has not received)
    or replay (an old message again); empty: any."""


@dataclass(frozen=True)
class Rates:
    """Faults an hour at random moments, by kind."""

    kill: float = 0.0
    """Learners' processes that are killed."""
    kill_worker: float = 0.0
    """Single workers of learners."""
    freeze: float = 0.0
    """Learners that are stopped."""
    slow: float = 0.0
    """Learners that are slowed down to a third."""
    mute: float = 0.0
    """Learners that are cut off."""
    corrupt: float = 0.0
    """Learners that send garbage."""
    preempt: float = 0.0
    """Learners that get notice and are killed."""
    kill_node: float = 0.0
    """Nodes that are lost; the head is not among them."""
    kill_syncer: float = 0.0
    """Of the syncer."""
    freeze_syncer: float = 0.0
    """Of the syncer."""
    kill_supervisor: float = 0.0
    """Of the supervisor."""
    kill_ledger: float = 0.0
    """Of the data ledger."""
    fill_disk: float = 0.0
    """Of the syncer's and the ledger's storage."""

    def items(self) -> Iterator[tuple[str, float]]:
        """Kind and rate of those that occur."""
        return ((kind, rate) for kind, rate in vars(self).items() if rate > 0)


@dataclass(frozen=True)
class ChaosConfig:
    """Faults that the run does to itself, to show or to test recovery."""

    faults: list[Fault] = field(default_factory=list)
    """The faults, each with kind and when, and what else its kind takes."""
    rates: Rates = field(default_factory=Rates)
    """Faults at random moments (Poisson) from the first merge on."""
    seconds: float = 5.0
    """How long a fault at random lasts."""
    seed: int = 1
    """Decides the moments and targets of faults at random."""


def check_chaos(chaos: ChaosConfig, learners: Collection[str], pools: Collection[str]) -> None:
    """Refuse a schedule that names what there is not, or times that are none."""
    for i, fault in enumerate(chaos.faults):
        _check_fault(f"chaos.faults[{i}]", fault, learners, pools)
    for kind, rate in vars(chaos.rates).items():
        at_least(f"chaos.rates.{kind}", rate, 0.0)
    at_least("chaos.seconds", chaos.seconds, 0.0)


def _check_fault(key: str, fault: Fault, learners: Collection[str], pools: Collection[str]) -> None:
    one_of(f"{key}.kind", fault.kind, FAULT_KINDS)
    if fault.kind in LEARNER_FAULTS:
        one_of(f"{key}.target", fault.target, ("", *learners))
    elif fault.kind == "kill_site":
        if "=" not in fault.target:
            one_of(f"{key}.target", fault.target, (*pools, "label=value"))
    else:
        one_of(f"{key}.target", fault.target, ("", fault.kind.rpartition("_")[2]))
    between(f"{key}.at", fault.at, 0.0, 1.0)
    if fault.at_s is not None:
        at_least(f"{key}.at_s", fault.at_s, 0.0)
    at_least(f"{key}.seconds", fault.seconds, 0.0)
    at_least(f"{key}.factor", fault.factor, 1.0)
    one_of(f"{key}.how", fault.how, ("", *CORRUPTIONS))
