"""The schema behind `conf/`: every key, its type, its default and what it means.

The text under each field is what `--help` prints. YAML files and command lines only override these defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from app.config.chaos import ChaosConfig
from app.config.pools import ElasticConfig, PoolConfig, SyncerConfig, sizes_of
from app.config.roster import first_learners, pool_name_of
from app.diloco.settings import DilocoSettings

ALGORITHMS = ("decoupled", "streaming", "diloco", "data_parallel")
FIXED_FLEET = ("streaming", "diloco", "data_parallel")
"""Algorithms in which all learners take part in every merge: there are never more than at the start."""
MODEL_NAMES = ("llama", "hf")
DATA_SOURCES = ("stdlib", "files", "hub")
LEARNING_RATES = {"muon": 12e-3, "adamw": 4e-3}
"""Default of `train.lr` by inner optimizer."""
OPTIMIZERS = tuple(LEARNING_RATES)
PRECISIONS = ("auto", "fp32", "bf16")
RECOVERIES = ("peer", "checkpoint", "fresh")
RESUME_RULES = ("never", "auto", "cut")
TRACKERS = ("none", "wandb")
TRACKING_MODES = ("offline", "online")


@dataclass(frozen=True)
class RunConfig:
    """The run: its name, its folder and how it starts."""

    name: str = "main"
    """Name of the run; also the name of its folder when `run.dir` is not given."""
    dir: str | None = None
    """Folder that holds everything about the run, or its URL in a store (s3://bucket/folder); null means
    runs/<run.name>."""
    cache_dir: str | None = None
    """Folder on each node for what needs a path when `run.dir` is a URL: the text's tokens, a model that is being
    written, events on their way; null means ~/.cache/decoupled-diloco."""
    seed: int = 1
    """Seed of the first weights and of the order of the data."""
    resume: str = "never"
    """What to do when the folder holds a checkpoint: never (refuse), auto (go on from it), or cut (go back to the
    newest consistent cut, and forget what came after it)."""
    shared_dir: bool = False
    """The run folder is the same on all nodes. Without it, a run on several nodes refuses a local folder."""
    preload: bool = True
    """Fork actors from a process on their node that has imported torch and transformers: they start much sooner."""

    @property
    def path(self) -> str:
        """`dir`, or runs/<name> when it is not given."""
        return self.dir if self.dir is not None else f"runs/{self.name}"


@dataclass(frozen=True)
class ModelConfig:
    """The language model."""

    name: str = "llama"
    """llama (a new Llama with tied embeddings) or hf (architecture and weights of a Hugging Face model)."""
    hidden: int = 128
    """Width of the model (llama)."""
    layers: int = 2
    """Number of transformer blocks (llama)."""
    heads: int = 4
    """Attention heads (llama); `model.hidden` must be a multiple of twice this number."""
    intermediate: int = 344
    """Width of the feed-forward layer (llama)."""
    path: str | None = None
    """Model folder or hub name (hf)."""


@dataclass(frozen=True)
class DataConfig:
    """The training text, its tokenizer and how it is handed out."""

    source: str = "stdlib"
    """stdlib (the running Python's own library), files (local files) or hub (a data set by name)."""
    path: str | None = None
    """File or folder of .txt, .jsonl or .parquet (files)."""
    text_field: str = "text"
    """Name of the column that holds the text (.jsonl, .parquet and hub)."""
    hub_name: str | None = None
    """Name of the data set (hub)."""
    hub_config: str | None = None
    """Configuration of the data set, where it has several (hub)."""
    split: str = "train"
    """Split of the data set (hub)."""
    tokenizer: str = "train"
    """train (byte-level BPE trained on the text), bytes (one token a byte), or a folder or hub name."""
    vocab: int = 1024
    """Vocabulary of a tokenizer that is trained here; at least 257."""
    seq_len: int = 128
    """Tokens in a sample."""
    heldout_share: float = 0.02
    """Share of the documents that is kept for evaluation, between 0 and 1."""
    block_samples: int = 256
    """Samples in a block, the unit in which the data ledger hands out work."""
    leases_ahead: int = 2
    """Blocks a learner leases ahead of the one it is on."""
    eval_samples: int = 64
    """Held-out samples in the fixed subset that is evaluated during the run."""
    max_bytes: int | None = None
    """Cut the text after this many bytes; null means all of it."""
    streaming: bool = False
    """Read the text in its own order and keep none of it (files and hub): for what is too large to prepare."""
    stream_head: int = 1000
    """Documents at the start of a stream of which some are held out for evaluation; a tokenizer that is trained here
    sees the others."""
    stream_patience_s: float = 300.0
    """Seconds for which a stream's source may be away before the run fails; learners wait for data meanwhile."""


@dataclass(frozen=True)
class TrainConfig:
    """The inner loop: warm-up and cosine by global tokens."""

    tokens: int = 2_400_000
    """Token budget of the whole run, all learners together."""
    batch_size: int = 8
    """Samples in one forward pass of one worker; a learner has one, unless its pool says otherwise."""
    accumulation: int = 1
    """Forward passes in one inner step."""
    optimizer: str = "muon"
    """muon (matrices by Muon, embeddings, output head and vectors by AdamW), or adamw (all)."""
    lr: float = LEARNING_RATES["muon"]
    """Peak learning rate; where it is not given, one that suits the optimizer."""
    min_lr_share: float = 0.1
    """Learning rate at the end of the budget, as a share of the peak, 0 to 1."""
    warmup_tokens: int = 120_000
    """Global tokens over which the learning rate rises from 0 to its peak."""
    weight_decay: float = 0.1
    """Weight decay; matrices only."""
    beta1: float = 0.9
    """First-moment decay of AdamW."""
    beta2: float = 0.95
    """Second-moment decay of AdamW."""
    muon_momentum: float = 0.9
    """Momentum of Muon."""
    grad_clip: float = 1.0
    """Gradients are scaled down to this norm."""
    precision: str = "auto"
    """auto (bf16 autocast on a GPU that has it, fp32 on a CPU), fp32 or bf16. Weights are always fp32."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    compile: bool = False
    """Compile the model with torch.compile; needs a compiler on the learners' nodes."""
    recovery: str = "peer"
    """Optimizer state of a learner that joins a run under way: peer (that of the learner with the most steps),
    checkpoint (its own latest one) or fresh, as where there is none to be had."""
    elastic: bool = False
    """With algo=data_parallel: a group that broke forms again with whoever is left, and takes in who comes back."""
    moments_every_steps: int = 20
    """Inner steps between two copies of a learner's optimizer state, for others and for its own checkpoint."""
    moments_every_s: float = 30.0
    """Seconds between two checkpoints of a learner's optimizer state (recovery=checkpoint)."""
    rejoin_warmup_steps: int = 10
    """Inner steps of extra warm-up after a join with an empty optimizer state."""


@dataclass(frozen=True)
class Pool:
    """A named pool as one of its learners has it."""

    name: str
    settings: PoolConfig
    train: TrainConfig
    """The inner loop, with what the pool says of it."""


@dataclass(frozen=True)
class TrackingConfig:
    """An experiment tracker beside the event tape."""

    kind: str = "none"
    """none or wandb."""
    project: str = "decoupled-diloco"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null means the account's own."""
    mode: str = "offline"
    """offline (written to the run folder, `wandb sync` later) or online."""
    group: str | None = None
    """W&B group; null means the name of the run."""
    tags: list[str] = field(default_factory=list)
    """W&B tags of the run."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text."""

    every_tokens: int = 240_000
    """Global tokens between two evaluations during the run, the first at its start; none if the budget is no more."""
    batch_size: int = 16
    """Samples in one forward pass of an evaluation."""
    prompt: str = "def "
    """What the sample at the end of the run starts with."""
    sample_tokens: int = 96
    """Tokens of the sample at the end of the run."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The syncer's durable state."""

    snapshot_every_merges: int = 64
    """Merges between two snapshots; the journal in between holds one record a merge."""
    keep: int = 2
    """Snapshots that are kept, and consistent cuts."""
    full: bool = False
    """Make consistent cuts as well: of syncer, ledger and every learner with its weights, optimizer state and place in
    the data. Nobody stops for them. A run that is resumed takes optimizer state from the newest one."""
    full_every_s: float = 600.0
    """Seconds between two consistent cuts."""
    full_deadline_s: float = 120.0
    """Seconds in which every learner must have saved its part of a cut."""


@dataclass(frozen=True)
class TapeConfig:
    """The event tape."""

    payloads: bool = False
    """Keep every contribution, so that `python -m app.replay` can compute all versions again."""


@dataclass(frozen=True)
class SupervisorConfig:
    """Watching, replacing and ending."""

    poll_s: float = 1.0
    """Seconds between two looks at the actors."""
    stop_deadline_s: float = 5.0
    """Seconds that the last round may take when the run is stopped before its budget."""
    start_deadline_s: float = 120.0
    """Seconds from placing a learner to its first step, after which its start counts as hanging."""
    most_failed_starts: int = 5
    """Starts in a row without a step, of every learner, after which the run has failed."""
    sample_every_s: float = 2.0
    """Seconds between two samples of every actor's counters in the event tape and the tracker."""
    evaluation_deadline_s: float = 3600.0
    """Seconds that the final evaluation and export may take before they are tried again."""
    evaluator_silent_s: float = 60.0
    """Seconds without a sign of life of the evaluator, which learners go before, after which it is made again."""
    final_tries: int = 3
    """How often the final evaluation and export are tried."""
    most_failures: int = 3
    """Unforeseen errors of the supervisor itself, after which the run has failed."""
    silent_s: float = 60.0
    """Seconds without an answer of the supervisor, after which the driver has it restarted."""
    linger_s: float = 15.0
    """Seconds for which a finished run waits for a driver to fetch its result before it leaves the cluster."""


@dataclass(frozen=True)
class Config:
    """Everything about one run."""

    learners: int = 4
    """M: learners to train with; pools with larger `max_learners` may add more on the way."""
    algo: str = "decoupled"
    """decoupled, streaming, diloco or data_parallel; each is a file of conf/algo that sets the rest of it."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run folder."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The language model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer, blocks."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The inner loop."""
    diloco: DilocoSettings = field(default_factory=DilocoSettings)
    """The algorithm."""
    pools: dict[str, PoolConfig] = field(default_factory=lambda: {"local": PoolConfig()})
    """The pools by name; learners are given to them in this order."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    """Pools that grow and shrink."""
    syncer: SyncerConfig = field(default_factory=SyncerConfig)
    """The syncer's process."""
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    """Faults to inject."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Experiment tracker."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Snapshots of the syncer."""
    tape: TapeConfig = field(default_factory=TapeConfig)
    """What the event tape keeps."""
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    """Watching, replacing and ending."""

    @property
    def learner_ids(self) -> tuple[str, ...]:
        """The learners that the run starts with, `learner-0` to `learner-<M-1>`."""
        return first_learners(self.learners)

    @property
    def pool_sizes(self) -> dict[str, int]:
        """Learners that each pool starts with, in the order in which they are given out."""
        return sizes_of(self.learners, self.pools)

    @property
    def most_step_tokens(self) -> int:
        """Tokens of an inner step of the pool with the largest."""
        sizes = (
            (pool.batch_size or self.train.batch_size)
            * (pool.accumulation or self.train.accumulation)
            * pool.workers_per_learner
            for pool in self.pools.values()
        )
        return max(sizes) * self.data.seq_len

    def has_learner(self, learner: str) -> bool:
        """Whether one of this name may be in the run, from the start or later."""
        return pool_name_of(learner, self.pool_sizes) is not None

    def pool_of(self, learner: str) -> Pool:
        """The pool of a learner, with the inner loop's settings as they are there. Raises ValueError: it has none."""
        name = pool_name_of(learner, self.pool_sizes)
        if name is None:
            raise ValueError(f"{learner} is no learner of this run")
        pool = self.pools[name]
        own = {key: getattr(pool, key) for key in ("batch_size", "accumulation", "precision")}
        train = replace(self.train, **{key: value for key, value in own.items() if value is not None})
        return Pool(name, pool, train)
