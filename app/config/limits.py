"""What no setting may exceed: beyond it a start would allocate, loop or wait without end and say nothing."""

from __future__ import annotations

from collections.abc import Iterable

from app.config.error import ConfigError

COUNT = 2**20
"""Sizes and counts of most kinds: anything larger fits no machine."""
EXACT = 2**53
"""Tokens and bytes: whole numbers up to here are exact in JSON."""
SECONDS = 1e9
"""Thirty years; the system's own timers take little more."""
AMOUNT = 2.0**16
"""CPUs or GPUs of one actor."""
PASS_TOKENS = 2**24
"""Tokens in one forward pass."""

MOST: dict[str, int] = {
    "learners": 4096,
    "model.layers": 4096,
    "data.leases_ahead": 1024,
    "diloco.ring_versions": 1024,
    "diloco.guard_rounds": 1024,
    "eval.sample_tokens": 2**16,
    "run.seed": 2**63 - 1,
    "train.tokens": EXACT,
    "train.warmup_tokens": EXACT,
    "eval.every_tokens": EXACT,
    "data.max_bytes": EXACT,
}
"""Whole numbers that have a bound of their own; all others are counts."""


def check_limits(leaves: Iterable[tuple[str, object]]) -> None:
    """Hold every number of a configuration (key, value) against the bound of its kind.

    Raises:
        ConfigError: for the first that exceeds it.
    """
    for key, value in leaves:
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        most = _most_of(key, isinstance(value, int))
        if most is not None and value > most:
            raise ConfigError(key, value, f"at most {most:,.0f} is possible")


def check_pass(key: str, batch_size: int, seq_len: int) -> None:
    """Refuse a batch that no machine holds. Raises ConfigError."""
    if batch_size * seq_len > PASS_TOKENS:
        raise ConfigError(
            key, batch_size, f"at most {PASS_TOKENS // seq_len:,} with data.seq_len={seq_len} is possible"
        )


def _most_of(key: str, whole: bool) -> float | None:
    """The bound of a key's kind; None for ratios and rates, which need none."""
    if whole and key in MOST:
        return MOST[key]
    name = key.rpartition(".")[2]
    if name.endswith("_s") or name == "seconds":
        return SECONDS
    if "cpus" in name or "gpus" in name:
        return AMOUNT
    return COUNT if whole else None
