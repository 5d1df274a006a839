"""The learners' names, and the pools they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate


def first_learners(learners: int) -> tuple[str, ...]:
    """Those that a run starts with, `learner-0` to `learner-<M-1>`, given out to the pools in order."""
    return tuple(f"learner-{i}" for i in range(learners))


def extra_learner(pool: str, number: int) -> str:
    """One that a pool has grown by, `<pool>-<number>`, numbered from 0."""
    return f"{pool}-{number}"


def pool_name_of(learner: str, sizes: Mapping[str, int]) -> str | None:
    """The pool of a learner; None when it can be no learner of the run. `sizes`: what each pool starts with."""
    pool, _, number = learner.rpartition("-")
    if not (number.isascii() and number.isdecimal() and str(int(number)) == number):
        return None
    if pool in sizes:
        return pool
    if pool != "learner":
        return None
    ends = zip(sizes, accumulate(sizes.values()), strict=True)
    return next((name for name, end in ends if int(number) < end), None)
