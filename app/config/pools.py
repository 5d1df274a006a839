"""The part of the schema that says where processes are placed, and what is special about the learners of a place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PoolConfig:
    """One pool: learners that are placed alike and train alike."""

    learners: int | None = None
    """Learners of this pool; null, in one pool at most, means those that the other pools leave of `learners`."""
    cpus_per_learner: float = 0.25
    """Logical CPUs that Ray sets aside for a learner; a part of one lets several learners share a core."""
    gpus_per_learner: float = 0.0
    """GPUs that Ray sets aside for a learner."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """Ray node labels that a learner's node must have, for example {ray.io/market-type: spot}."""
    batch_size: int | None = None
    """Samples in one forward pass of a learner; null means `train.batch_size`."""
    accumulation: int | None = None
    """Forward passes in one inner step; null means `train.accumulation`."""
    precision: str | None = None
    """auto, fp32 or bf16; null means `train.precision`."""
    slowdown: float = 1.0
    """A learner rests after each step so that a step takes this many times as long: a mixed fleet on one machine."""


def sizes_of(learners: int, pools: Mapping[str, PoolConfig]) -> dict[str, int]:
    """Learners of each pool, in the order in which they are given out: null means those that the others leave."""
    given = sum(pool.learners or 0 for pool in pools.values())
    return {name: learners - given if pool.learners is None else pool.learners for name, pool in pools.items()}


@dataclass(frozen=True)
class SyncerConfig:
    """The process that merges."""

    cpus: float = 0.5
    """Logical CPUs that Ray sets aside for the syncer, and as many again for its standby."""
    standby: bool = False
    """Keep a second syncer, on another node where there is one: it follows the journal, and takes over when the first
    one or its node dies or falls silent."""
    standby_after_s: float = 5.0
    """Seconds of silence of the syncer that leads after which the standby takes over; at once when its process dies."""

    @property
    def all_cpus(self) -> float:
        """Logical CPUs of all syncers."""
        return self.cpus * (2 if self.standby else 1)
