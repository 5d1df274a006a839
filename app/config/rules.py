"""What checks of single values are made of; each refuses by a ConfigError with key, value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection

from app.config.error import ConfigError


def one_of(key: str, value: str, allowed: Collection[str]) -> None:
    """Refuse what is not among the allowed."""
    if value not in allowed:
        raise ConfigError(key, value, f"allowed are {', '.join(a or 'empty' for a in allowed)}")


def at_least(key: str, value: float, least: float) -> None:
    """Refuse less."""
    if value < least:
        raise ConfigError(key, value, f"at least {least} is needed")


def above(key: str, value: float, bound: float) -> None:
    """Refuse this bound and less."""
    if value <= bound:
        raise ConfigError(key, value, f"more than {bound:g} is needed")


def whole_above_one(key: str, amount: float) -> None:
    """Refuse what Ray does not give out."""
    if amount > 1 and amount != int(amount):
        raise ConfigError(key, amount, "Ray gives out fractions below 1 and whole numbers above")


def between(key: str, value: float, low: float, high: float) -> None:
    """Refuse what lies outside the closed interval."""
    if not low <= value <= high:
        raise ConfigError(key, value, f"allowed is {low:g} to {high:g}")


def open_interval(key: str, value: float, low: float, high: float) -> None:
    """Refuse what lies outside the open interval."""
    if not low < value < high:
        raise ConfigError(key, value, f"allowed is more than {low:g} and less than {high:g}")


def share_below_one(key: str, value: float) -> None:
    """Refuse what is not in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ConfigError(key, value, "allowed is 0 or more and less than 1")


def int_range(key: str, value: int, low: int, high: int, high_key: str) -> None:
    """Refuse what lies outside; `high_key` is the setting that gives the upper end."""
    if not low <= value <= high:
        raise ConfigError(key, value, f"allowed are {low} to {high_key}={high}")
