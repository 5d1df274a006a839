"""When: the global clock, the steps at which fragments are due, the grace window and the hang deadline.

Clocks and steps are inner steps (integers); times are seconds.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from app.diloco.fragments import due_step_offset


def kth_largest(clocks: Sequence[int], k: int) -> int:
    """The k-th largest clock, k from 1. Raises ValueError unless 1 ≤ k ≤ number of clocks."""
    if not 1 <= k <= len(clocks):
        raise ValueError(f"no {k}-th largest of {len(clocks)} clocks")
    return sorted(clocks, reverse=True)[k - 1]


class GlobalClock:
    """The global clock t: the K-th largest clock of the live learners, never falling.

    A slow learner never holds it back (Decoupled DiLoCo, arXiv 2604.21428).
    """

    def __init__(self, t: int = 0) -> None:
        self.t = t

    def advance(self, live_clocks: Sequence[int], k: int) -> int:
        """Take the live learners' clocks and return t. With fewer than k live learners t stays."""
        if len(live_clocks) >= k:
            self.t = max(self.t, kth_largest(live_clocks, k))
        return self.t


def due_slots(previous_t: int, t: int, P: int, H: int) -> tuple[list[int], int]:
    """Fragments that became due in the steps (previous_t, t], and how many of their slots were skipped.

    Fragment p is due at steps s with s mod H = floor(pH/P). Each fragment is due once at most, in the order
    of its first slot in the range; further slots of it, after a jump of the clock, count as skipped. Raises
    ValueError when t < previous_t.
    """
    if t < previous_t:
        raise ValueError(f"the clock fell from {previous_t} to {t}")
    due: list[tuple[int, int]] = []
    slots = 0
    for p in range(P):
        first = previous_t + 1 + (due_step_offset(p, P, H) - previous_t - 1) % H
        if first <= t:
            due.append((first, p))
            slots += 1 + (t - first) // H
    return [p for _, p in sorted(due)], slots - len(due)


def grace_window(
    overlap_steps: int, step_time: float, time_to_quorum: float, merge_return_time: float, safety: float
) -> float:
    """Seconds to wait after the quorum: γ · max(0, τ · step_time − (time to quorum + merge and return)).

    What the window adds must fit into the τ steps for which a fragment may be in flight; `safety` is γ, 0 to
    1. Source: Decoupled DiLoCo (arXiv 2604.21428); γ is ours.
    """
    return safety * max(0.0, overlap_steps * step_time - (time_to_quorum + merge_return_time))


class Estimate:
    """A running estimate of a duration: the median of its last observations, deaf to single outliers."""

    def __init__(self, window: int = 32, initial: float = 0.0) -> None:
        self._seen: deque[float] = deque(maxlen=window)
        self._initial = initial

    def add(self, seconds: float) -> None:
        """Take one observation."""
        self._seen.append(seconds)

    @property
    def value(self) -> float:
        """Median of the observations in the window; `initial` while there is none."""
        return statistics.median(self._seen) if self._seen else self._initial


def fleet_stretch(recent: Sequence[float], usual: Sequence[float]) -> float:
    """How much slower the fleet is than usual: median over learners of recent / usual step time, at least 1.

    The two sequences name the same learners in the same order; learners without a usual step time (0) do not
    count. Raises ValueError when their lengths differ.
    """
    ratios = [now / then for now, then in zip(recent, usual, strict=True) if then > 0]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def hang_deadline(median_step_s: float, min_s: float, steps_factor: float, stretch: float) -> float:
    """Seconds of silence after which a learner hangs: max(min_s, steps_factor · median step) · stretch.

    `stretch` is what `fleet_stretch` says: a machine that is slow for all hangs nobody.
    """
    return max(min_s, steps_factor * median_step_s) * stretch
