"""Every dial of the algorithm, with its symbol, in one dataclass."""

from __future__ import annotations

from dataclasses import dataclass

CODECS = ("fp32", "bf16", "int8", "int4", "fp4")
CODEC_BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ADOPTIONS = ("overwrite", "mix", "rebase", "keep")
LATE_RULES = ("discard", "merge")
MERGE_RULES = ("rda", "mean")
OUTER_RULES = ("nesterov", "sgd")
LAST_ROUNDS = ("mean", "outer")


@dataclass(frozen=True)
class DilocoSettings:
    """The algorithm's dials. Symbols as in the paper; checked by `app.config.check`."""

    fragments: int = 8
    """P: fragments the parameters are split into."""
    sync_interval: int = 24
    """H: inner steps between two syncs of the same fragment."""
    overlap_steps: int = 2
    """τ: inner steps a fragment may be in flight (0 only with `blocking`)."""
    blocking: bool = False
    """Learners wait for a merged fragment when they are τ steps past its slot: the synchronous relatives."""
    min_quorum: int = 1
    """K: fewest learners with work in a merge."""
    grace_safety: float = 0.8
    """γ: the part of the slack that the grace window may use, 0 to 1. 0 closes a round at its quorum."""
    ring_versions: int = 4
    """R: versions of each fragment that the syncer keeps."""
    codec_up: str = "fp32"
    """Codec of contributions, learner to syncer: fp32, bf16, or int8, int4, fp4 (E3M0) in blocks with a scale."""
    codec_down: str = "fp32"
    """Codec of offers, syncer to learner: the same choice."""
    codec_block: int = 64
    """Elements that share a 2-byte scale in int8, int4 and fp4: a power of two, 16 to 4096. Fewer err less."""
    error_feedback: bool = False
    """Learners add what the codec left out of a merged contribution to their next one (adopt=overwrite or mix)."""
    adopt: str = "rebase"
    """What a learner does with an offered fragment: overwrite, mix, rebase, or keep (it keeps its own)."""
    mix_alpha: float = 0.5
    """α of adopt=mix: the share of the learner's own value that stays, 0 to 1."""
    late: str = "merge"
    """A contribution on an older base that holds unmerged work: merge (while its base is in the ring) or discard."""
    merge: str = "rda"
    """How outer gradients are averaged: rda (embedding-like tensors by mean, all others by RDA) or mean (all)."""
    outer: str = "nesterov"
    """The outer optimizer: nesterov, or sgd (plain momentum; none with outer_momentum=0)."""
    outer_lr: float = 0.8
    """η: learning rate of the outer step."""
    outer_momentum: float = 0.5
    """μ: momentum of the outer step."""
    outer_gain_muon: float = 1.6
    """η/(1−μ) where η and μ are not given, with Muon inside."""
    outer_gain_adamw: float = 1.0
    """η/(1−μ) where η and μ are not given, with AdamW inside."""
    outer_memory: float = 0.4
    """1/(1−μ) over √N where μ is not given: N outer rounds are in the budget."""
    outer_memory_least: float = 2.0
    """Least 1/(1−μ), in outer rounds, where μ is not given."""
    outer_memory_most: float = 10.0
    """Largest 1/(1−μ), in outer rounds, where μ is not given."""
    last_round: str = "mean"
    """The last round, at the token budget: mean (Θ becomes the mean of the learners' weights) or outer (as before)."""
    average: float = 0.06
    """Share of the run over which Θ is averaged to the model that is evaluated and exported, 0 to 1; 0: Θ as it is."""
    average_last: float = 0.5
    """Least weight of the last round in that average, where it takes the mean."""
    rda_threshold: float = 0.02
    """Norm of the mean direction under which a merge falls back from RDA to the weighted mean."""
    guard_z: float = 8.0
    """Highest robust z-score of a contribution's norm among those of its fragment; above it is refused. 0: no guard."""
    guard_rounds: int = 16
    """Rounds of a fragment whose norms its guard remembers, beside those of the open one."""
    guard_after: int = 5
    """Rounds that a guard must remember, the open one apart, before it refuses anything: 3 to `guard_rounds`."""
    guard_spread: float = 0.1
    """Least spread (MAD of log norms) that a guard reckons with: very even learners would refuse each other."""
    most_garbage: int = 16
    """Garbage messages in a row after which a learner is fenced off, and another process replaces it. 0: never."""
    round_deadline_s: float = 30.0
    """Seconds after which a round closes with what it has, or is given up when that is under its quorum."""
    final_deadline_s: float = 20.0
    """Seconds that the last round of all fragments may take, at the token budget."""
    journal_retry_s: float = 1.0
    """Seconds until a merge whose journal record could not be written is tried again."""
    hang_min_s: float = 15.0
    """Shortest silence, in seconds, after which a learner counts as hanging."""
    hang_steps: float = 20.0
    """A learner hangs when it is silent for this many of its own median step times (and at least `hang_min_s`)."""
