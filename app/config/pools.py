"""The part of the schema that says where processes are placed, and what is special about the learners of a place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CPU = "cpu"
"""`accelerator` of pools that want none."""
ACCELERATOR_LABEL = "ray.io/accelerator-type"
"""Label that Ray gives nodes whose accelerator it knows, such as A100 or TPU-V5E."""
MARKET_LABEL = "ray.io/market-type"
SPOT = "spot"


@dataclass(frozen=True)
class PoolConfig:
    """One pool: learners that are placed alike and train alike."""

    accelerator: str = CPU
    """cpu, or what the label ray.io/accelerator-type of a learner's nodes must say, for example A100 or TPU-V5E."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """More Ray node labels that a learner's nodes must have, for example {zone: a}; !a, in(a,b) and !in(a,b) work."""
    spot: bool = False
    """The pool's learners run on nodes marked as spot (ray.io/market-type), and on no others."""
    workers_per_learner: int = 1
    """W: processes of a learner, each a rank of its group."""
    one_node: bool = True
    """All workers of a learner on one node; false lets a group span several."""
    sharded: bool = False
    """Shard parameters and optimizer state over a learner's workers (FSDP2); false gives each a copy (DDP)."""
    cpus_per_worker: float = 0.25
    """Logical CPUs that Ray sets aside for a worker; a part of one lets several share a core."""
    gpus_per_worker: float = 0.0
    """GPUs that Ray sets aside for a worker."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Other resources of Ray's that it sets aside for a worker, for example {TPU: 4}."""
    min_learners: int | None = None
    """Learners that the run starts with in this pool; null, in one pool at most, means those that the other pools leave
    of `learners`."""
    max_learners: int | None = None
    """Learners that it may grow to when nodes appear; null means no more than it starts with."""
    batch_size: int | None = None
    """Samples in one forward pass of a worker; null means `train.batch_size`."""
    accumulation: int | None = None
    """Forward passes in one inner step; null means `train.accumulation`."""
    precision: str | None = None
    """auto, fp32 or bf16; null means `train.precision`."""
    slowdown: float = 1.0
    """A learner rests after each step so that a step takes this many times as long: a mixed fleet on one machine."""

    @property
    def resources(self) -> dict[str, float]:
        """What Ray sets aside for a worker, by resource."""
        named = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker, **self.resources_per_worker}
        return {resource: amount for resource, amount in named.items() if amount}

    @property
    def labels(self) -> dict[str, str]:
        """Labels that the nodes of a learner must have."""
        labels = {} if self.accelerator == CPU else {ACCELERATOR_LABEL: self.accelerator}
        if self.spot:
            labels[MARKET_LABEL] = SPOT
        return labels | dict(self.label_selector)


def sizes_of(learners: int, pools: Mapping[str, PoolConfig]) -> dict[str, int]:
    """Learners that each pool starts with, in the order in which they are given out: null means the others' rest."""
    given = sum(pool.min_learners or 0 for pool in pools.values())
    return {name: learners - given if pool.min_learners is None else pool.min_learners for name, pool in pools.items()}


@dataclass(frozen=True)
class SyncerConfig:
    """The process that merges."""

    cpus: float = 0.5
    """Logical CPUs that Ray sets aside for the syncer, and as many again for its standby."""
    spot: bool = False
    """Let the syncer and the data ledger run on nodes marked as spot (ray.io/market-type), too."""
    label_selector: dict[str, str] = field(default_factory=dict)
    """More Ray node labels that the nodes of the syncer and the data ledger must have."""
    standby: bool = False
    """Keep a second syncer, on another node where there is one: it follows the journal, and takes over when the first
    one or its node dies or falls silent."""
    standby_after_s: float = 5.0
    """Seconds of silence of the syncer that leads after which the standby takes over; at once when its process dies."""

    @property
    def all_cpus(self) -> float:
        """Logical CPUs of all syncers."""
        return self.cpus * (2 if self.standby else 1)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that its nodes must have. Those that say nothing of spot or not are taken for stable."""
        return ({} if self.spot else {MARKET_LABEL: f"!{SPOT}"}) | dict(self.label_selector)


@dataclass(frozen=True)
class ElasticConfig:
    """Pools that grow and shrink, and learners whose nodes are taken away."""

    hand_in_s: float = 20.0
    """Seconds at most in which a learner that has to go hands in its work; less where its node has less time."""
    request_s: float = 300.0
    """Seconds after which a request for a node for one more learner rests, so that it does not hold up others."""
    rest_s: float = 60.0
    """Seconds for which it rests."""
    steady_s: float = 60.0
    """A learner that loses its node sooner than this after it got it makes its pool ask for others later and later."""
    backoff_s: float = 5.0
    """Seconds that a pool waits after the first such loss; twice as long after each further one in a row."""
    backoff_most_s: float = 300.0
    """Seconds that it waits at most."""
