"""Every check on a configuration. Pure, except that it may look whether named local files exist."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from app.config.chaos import check_chaos
from app.config.error import ConfigError
from app.config.limits import check_limits, check_pass
from app.config.location import check_location
from app.config.pool_checks import check_pools
from app.config.rules import (
    above,
    at_least,
    between,
    int_range,
    one_of,
    share_below_one,
    whole_above_one,
)
from app.config.schema import (
    ALGORITHMS,
    OPTIMIZERS,
    PRECISIONS,
    RECOVERIES,
    RESUME_RULES,
    TRACKERS,
    TRACKING_MODES,
    Config,
)
from app.config.sources import check_data, check_model
from app.diloco.settings import (
    ADOPTIONS,
    CODEC_BLOCKS,
    CODECS,
    LAST_ROUNDS,
    LATE_RULES,
    MERGE_RULES,
    OUTER_RULES,
)


def check(config: Config, here: bool = True) -> None:
    """Refuse what can't work, with the key, the value and what is allowed.

    Args:
        config: the run's configuration.
        here: the run starts on this machine, so that files which it names must be there.

    Raises:
        ConfigError: for the first wrong value found.
    """
    _check_finite(config)
    check_limits(_leaves(config, ""))
    _check_run(config)
    check_model(config, here)
    check_data(config, here)
    _check_train(config)
    _check_algo(config)
    check_pools(config)
    _check_diloco(config)
    check_chaos(config.chaos, config.learner_ids, config.pools)
    _check_rest(config)


def check_fragments(layout_capacity: int, config: Config) -> None:
    """Refuse P above what the model's tensors can fill.

    Args:
        layout_capacity: most fragments that this model can be split into; each needs at least one tensor (or
            rows of an embedding).
        config: the run's configuration.

    Raises:
        ConfigError: when `diloco.fragments` is larger.
    """
    if config.diloco.fragments > layout_capacity:
        raise ConfigError(
            "diloco.fragments",
            config.diloco.fragments,
            f"allowed are 1 to {layout_capacity}, as this model can be split no further",
        )


def _check_run(config: Config) -> None:
    name = config.run.name
    if not name or name in {".", ".."} or any(c in name for c in "/\\\n\0"):
        raise ConfigError("run.name", name, "a name without slashes is needed")
    if config.run.dir == "":
        raise ConfigError("run.dir", "", "a folder or null is needed")
    check_location(config.run, config.chaos)
    one_of("run.resume", config.run.resume, RESUME_RULES)
    between("run.seed", config.run.seed, 0, 2**63 - 1)
    at_least("learners", config.learners, 1)


def _check_train(config: Config) -> None:
    train = config.train
    for key in ("tokens", "batch_size", "accumulation"):
        at_least(f"train.{key}", getattr(train, key), 1)
    check_pass("train.batch_size", train.batch_size, config.data.seq_len)
    check_pass("eval.batch_size", config.eval.batch_size, config.data.seq_len)
    above("train.lr", train.lr, 0.0)
    above("train.grad_clip", train.grad_clip, 0.0)
    between("train.min_lr_share", train.min_lr_share, 0.0, 1.0)
    for key in ("warmup_tokens", "weight_decay", "rejoin_warmup_steps"):
        at_least(f"train.{key}", getattr(train, key), 0)
    share_below_one("train.beta1", train.beta1)
    share_below_one("train.beta2", train.beta2)
    share_below_one("train.muon_momentum", train.muon_momentum)
    one_of("train.optimizer", train.optimizer, OPTIMIZERS)
    one_of("train.precision", train.precision, PRECISIONS)
    one_of("train.recovery", train.recovery, RECOVERIES)
    at_least("train.moments_every_steps", train.moments_every_steps, 1)
    above("train.moments_every_s", train.moments_every_s, 0.0)


FEWEST_GUARD_ROUNDS = 3
"""Norms grow a hundredfold from a fragment's first round to its second: fewer rounds say nothing of what is usual."""

NEEDED: dict[str, dict[str, object]] = {
    "data_parallel": {
        "adopt": "keep",
        "blocking": False,
        "late": "discard",
        "codec_up": "fp32",
        "codec_down": "fp32",
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "guard_z": 0.0,
        "last_round": "outer",
    },
    "diloco": {"blocking": True, "fragments": 1, "overlap_steps": 0},
    "streaming": {"blocking": True},
}
"""What makes the algorithm what it is, of the keys in its file of conf/algo; the others may be changed.

The syncer of a data-parallel run follows the weights that all learners share, so that Θ = θ.
"""


def _check_algo(config: Config) -> None:
    algo, diloco = config.algo, config.diloco
    one_of("algo", algo, ALGORITHMS)
    for key, needed in NEEDED.get(algo, {}).items():
        if (value := getattr(diloco, key)) != needed:
            raise ConfigError(f"diloco.{key}", value, f"{str(needed).lower()} is needed when algo={algo}")
    if algo in ("diloco", "streaming") and diloco.min_quorum != config.learners:
        allowed = f"learners={config.learners} is needed when algo={algo}: every merge is of all learners"
        raise ConfigError("diloco.min_quorum", diloco.min_quorum, allowed)
    if algo != "data_parallel":
        if diloco.adopt == "keep":
            raise ConfigError("diloco.adopt", "keep", f"rebase, overwrite or mix is needed when algo={algo}")
        if config.train.elastic:
            allowed = f"false is needed when algo={algo}: it is for algo=data_parallel alone"
            raise ConfigError("train.elastic", True, allowed)
        return
    for name, pool in config.pools.items():
        if 0 < pool.gpus_per_worker < 1:
            key = f"pools.{name}.gpus_per_worker"
            raise ConfigError(key, pool.gpus_per_worker, "0 or whole GPUs are needed when algo=data_parallel")


def _check_diloco(config: Config) -> None:
    """The ranges of the algorithm's dials.

    P ≤ H, so that no two fragments are due at the same step: that spreads the traffic evenly. τ ≤ H, so
    that a fragment is back before it is due again. τ = 0 has no meaning for learners that never wait.
    """
    diloco = config.diloco
    at_least("diloco.sync_interval", diloco.sync_interval, 1)
    int_range("diloco.fragments", diloco.fragments, 1, diloco.sync_interval, "diloco.sync_interval")
    fewest = 0 if diloco.blocking else 1
    int_range("diloco.overlap_steps", diloco.overlap_steps, fewest, diloco.sync_interval, "diloco.sync_interval")
    int_range("diloco.min_quorum", diloco.min_quorum, 1, config.learners, "learners")
    between("diloco.grace_safety", diloco.grace_safety, 0.0, 1.0)
    at_least("diloco.ring_versions", diloco.ring_versions, 1)
    one_of("diloco.codec_up", diloco.codec_up, CODECS)
    one_of("diloco.codec_down", diloco.codec_down, CODECS)
    if diloco.codec_block not in CODEC_BLOCKS:
        allowed = f"a power of two from {CODEC_BLOCKS[0]} to {CODEC_BLOCKS[-1]} is needed"
        raise ConfigError("diloco.codec_block", diloco.codec_block, allowed)
    one_of("diloco.adopt", diloco.adopt, ADOPTIONS)
    if diloco.error_feedback and diloco.adopt in ("rebase", "keep"):
        allowed = f"false is needed when diloco.adopt={diloco.adopt}, which keeps what a codec leaves out anyway"
        raise ConfigError("diloco.error_feedback", diloco.error_feedback, allowed)
    if diloco.error_feedback and diloco.codec_up == "fp32":
        allowed = "false is needed when diloco.codec_up=fp32, which leaves nothing out"
        raise ConfigError("diloco.error_feedback", True, allowed)
    one_of("diloco.late", diloco.late, LATE_RULES)
    one_of("diloco.merge", diloco.merge, MERGE_RULES)
    one_of("diloco.outer", diloco.outer, OUTER_RULES)
    one_of("diloco.last_round", diloco.last_round, LAST_ROUNDS)
    at_least("diloco.guard_z", diloco.guard_z, 0.0)
    at_least("diloco.guard_rounds", diloco.guard_rounds, FEWEST_GUARD_ROUNDS)
    int_range("diloco.guard_after", diloco.guard_after, FEWEST_GUARD_ROUNDS, diloco.guard_rounds, "diloco.guard_rounds")
    above("diloco.guard_spread", diloco.guard_spread, 0.0)
    at_least("diloco.most_garbage", diloco.most_garbage, 0)
    between("diloco.mix_alpha", diloco.mix_alpha, 0.0, 1.0)
    for key in ("outer_gain_muon", "outer_gain_adamw", "outer_memory"):
        above(f"diloco.{key}", getattr(diloco, key), 0.0)
    at_least("diloco.outer_memory_least", diloco.outer_memory_least, 1.0)
    at_least("diloco.outer_memory_most", diloco.outer_memory_most, diloco.outer_memory_least)
    above("diloco.outer_lr", diloco.outer_lr, 0.0)
    share_below_one("diloco.outer_momentum", diloco.outer_momentum)
    for key in ("average", "average_last"):
        between(f"diloco.{key}", getattr(diloco, key), 0.0, 1.0)
    between("diloco.rda_threshold", diloco.rda_threshold, 0.0, 1.0)
    for key in ("round_deadline_s", "final_deadline_s", "journal_retry_s", "hang_min_s", "hang_steps"):
        above(f"diloco.{key}", getattr(diloco, key), 0.0)


def _check_rest(config: Config) -> None:
    at_least("syncer.cpus", config.syncer.cpus, 0.0)
    whole_above_one("syncer.cpus", config.syncer.cpus)
    above("syncer.standby_after_s", config.syncer.standby_after_s, 0.0)
    one_of("tracking.kind", config.tracking.kind, TRACKERS)
    one_of("tracking.mode", config.tracking.mode, TRACKING_MODES)
    for key in ("every_tokens", "batch_size", "sample_tokens"):
        at_least(f"eval.{key}", getattr(config.eval, key), 1)
    at_least("checkpoint.snapshot_every_merges", config.checkpoint.snapshot_every_merges, 1)
    at_least("checkpoint.keep", config.checkpoint.keep, 1)
    above("checkpoint.full_every_s", config.checkpoint.full_every_s, 0.0)
    above("checkpoint.full_deadline_s", config.checkpoint.full_deadline_s, 0.0)
    if config.checkpoint.full and config.algo == "data_parallel":
        raise ConfigError("checkpoint.full", True, "false with algo=data_parallel")
    for key in ("most_failed_starts", "final_tries", "most_failures"):
        at_least(f"supervisor.{key}", getattr(config.supervisor, key), 1)
    for group in ("supervisor", "elastic"):
        part = getattr(config, group)
        for field in dataclasses.fields(part):
            if field.name.endswith("_s"):
                above(f"{group}.{field.name}", getattr(part, field.name), 0.0)


def _check_finite(config: Config) -> None:
    for key, value in _leaves(config, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(key, value, "a finite number is needed")


def _leaves(node: object, key: str) -> Iterator[tuple[str, object]]:
    if dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from _leaves(getattr(node, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(node, dict):
        for name, item in node.items():
            yield from _leaves(item, f"{key}.{name}")
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from _leaves(item, f"{key}[{i}]")
    else:
        yield key, node
