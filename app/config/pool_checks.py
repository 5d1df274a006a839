"""Checks on the pools. Pure."""

from __future__ import annotations

from app.config.error import ConfigError
from app.config.limits import MOST, check_pass
from app.config.pools import PoolConfig
from app.config.rules import above, at_least, int_range, one_of, whole_above_one
from app.config.schema import FIXED_FLEET, PRECISIONS, Config


def check_pools(config: Config) -> None:
    """Refuse pools that can't work. Raises ConfigError."""
    if not config.pools:
        raise ConfigError("pools", "{}", "at least one pool is needed")
    for name, pool in config.pools.items():
        _check_pool(f"pools.{name}", name, pool)
        _check_group(f"pools.{name}", pool, config.algo)
        if pool.batch_size is not None:
            check_pass(f"pools.{name}.batch_size", pool.batch_size, config.data.seq_len)
    rest = [name for name, pool in config.pools.items() if pool.min_learners is None]
    if len(rest) > 1:
        allowed = f"a number is needed, as pools.{rest[0]} takes the rest"
        raise ConfigError(f"pools.{rest[1]}.min_learners", None, allowed)
    given = {name: pool.min_learners for name, pool in config.pools.items() if pool.min_learners is not None}
    total = sum(given.values())
    if total > config.learners or (total < config.learners and not rest):
        name, number = list(given.items())[-1]
        allowed = f"the pools have {total} learners, and learners={config.learners}"
        raise ConfigError(f"pools.{name}.min_learners", number, allowed + "; null in one pool means the rest")
    for name, size in config.pool_sizes.items():
        most = config.pools[name].max_learners
        if most is not None:
            if config.algo in FIXED_FLEET and most > size:
                allowed = f"at most {size}: algo={config.algo} has the learners that it starts with"
                raise ConfigError(f"pools.{name}.max_learners", most, allowed)
            int_range(f"pools.{name}.max_learners", most, size, MOST["learners"], "learners that one run can have")


def _check_group(key: str, pool: PoolConfig, algo: str) -> None:
    """A learner of several workers."""
    workers = pool.workers_per_learner
    at_least(f"{key}.workers_per_learner", workers, 1)
    if workers > 1 and algo == "data_parallel":
        allowed = "1 is needed when algo=data_parallel, whose learners are a group themselves"
        raise ConfigError(f"{key}.workers_per_learner", workers, allowed)
    if workers > 1 and 0 < pool.gpus_per_worker < 1:
        allowed = f"0 or whole GPUs are needed when workers_per_learner={workers}"
        raise ConfigError(f"{key}.gpus_per_worker", pool.gpus_per_worker, allowed)


def _check_pool(key: str, name: str, pool: PoolConfig) -> None:
    if not name or any(c in name for c in "/\\\n\0"):
        raise ConfigError("pools", name, "a name without slashes is needed")
    if name.startswith("learner"):
        raise ConfigError("pools", name, "a name that does not start with learner is needed: learners are called so")
    if pool.min_learners is not None:
        at_least(f"{key}.min_learners", pool.min_learners, 0)
    for resource, amount in pool.resources_per_worker.items():
        above(f"{key}.resources_per_worker.{resource}", amount, 0.0)
    if not pool.accelerator:
        raise ConfigError(
            f"{key}.accelerator", "", "cpu or a value of the node label ray.io/accelerator-type is needed"
        )
    above(f"{key}.cpus_per_worker", pool.cpus_per_worker, 0.0)
    at_least(f"{key}.gpus_per_worker", pool.gpus_per_worker, 0.0)
    for resource in ("cpus_per_worker", "gpus_per_worker"):
        whole_above_one(f"{key}.{resource}", getattr(pool, resource))
    if pool.batch_size is not None:
        at_least(f"{key}.batch_size", pool.batch_size, 1)
    if pool.accumulation is not None:
        at_least(f"{key}.accumulation", pool.accumulation, 1)
    if pool.precision is not None:
        one_of(f"{key}.precision", pool.precision, PRECISIONS)
    at_least(f"{key}.slowdown", pool.slowdown, 1.0)
