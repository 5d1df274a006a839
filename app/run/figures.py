"""The figures of a run, each one pure function. Definitions: docs of the protocol, words used in figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from app.diloco.accounts import Balance
from app.run.facts import MergeFacts

Interval = tuple[float, float]


def participation(merges: Iterable[MergeFacts]) -> float | None:
    """Mean over merges of contributors / live; None without a merge."""
    shares = [merge.contributors / merge.live for merge in merges]
    return sum(shares) / len(shares) if shares else None


def max_gap(merge_times: Sequence[float]) -> float | None:
    """Longest time between two merges in a row, seconds; None with fewer than two."""
    times = sorted(merge_times)
    return max((later - earlier for earlier, later in pairwise(times)), default=None)


def uptime(intervals: Iterable[Interval], start: float, end: float) -> float | None:
    """Share of `start` to `end` that is covered by at least one of the intervals, 0 to 1; None for no time."""
    if end <= start:
        return None
    covered, reached = 0.0, start
    for low, high in sorted(intervals):
        low, high = max(low, reached), min(high, end)
        if high > low:
            covered += high - low
            reached = high
    return covered / (end - start)


def goodput(step_s: float, merged_share: float, allocated_s: float) -> float | None:
    """Learner-seconds of merged steps / learner-seconds allocated.

    Args:
        step_s: seconds inside inner steps, all learners together.
        merged_share: merged / processed work; a step counts in proportion to the part of it that was merged.
        allocated_s: seconds for which learners' places were held, all learners together.
    """
    return step_s * merged_share / allocated_s if allocated_s > 0 else None


def data_parallel_bytes(parameters: int, workers: int, steps: int) -> int:
    """What data parallel training of the same steps would have moved: a bf16 ring all-reduce at every step.

    Each of M workers sends 2 · (M−1)/M · 2 bytes · N at each step, so M workers that make `steps` steps together
    (`steps`/M each) send 4 · N · (M−1)/M · steps. Rounded down to whole bytes.
    """
    return 4 * parameters * (workers - 1) * steps // workers


def tokens_by_fate(balance: Balance) -> dict[str, int]:
    """Work in whole tokens: `merged`, `outstanding`, and each reason of a discard.

    Units of token × parameter are divided by the number of parameters; the tokens lost by rounding down go to the
    largest remainders, so that the sum is exactly the tokens processed.
    """
    units = {"merged": balance.merged, "outstanding": balance.outstanding, **balance.discarded}
    tokens = {fate: count // balance.parameters for fate, count in units.items()}
    missing = balance.processed // balance.parameters - sum(tokens.values())
    largest = sorted(units, key=lambda fate: (-(units[fate] % balance.parameters), fate))
    for fate in largest[: max(0, missing)]:
        tokens[fate] += 1
    return tokens
