"""Learners that wait: the synchronous relatives (DiLoCo, Streaming DiLoCo) as a setting of the same loop.

A blocking learner stands still when it is τ steps past a fragment's slot and has not adopted what was merged there.
(DiLoCo, arXiv 2311.08105: τ = 0 and one fragment; Streaming DiLoCo, arXiv 2501.18512: several fragments, τ > 0.)
"""

from __future__ import annotations

from collections.abc import Sequence

from app.diloco.fragments import due_step_offset
from app.diloco.settings import DilocoSettings


def waits_for(clock: int, versions_clock: Sequence[int], settings: DilocoSettings, joined_at: int) -> int | None:
    """The fragment that a learner at step `clock` must adopt before its next step; None when it may go on.

    It waits for p when joined_at < s_p ≤ clock − τ, where s_p is the newest slot of p (a step s with
    s mod H = floor(pH/P)) that is τ steps back, and `versions_clock[p]`, the global clock at which the adopted
    version of p was made, is less than s_p. Of several it is the one with the oldest slot. `joined_at` is the clock
    at which the learner joined: what was due before came with the welcome.
    """
    P, H = settings.fragments, settings.sync_interval
    latest = clock - settings.overlap_steps
    slots = [latest - (latest - due_step_offset(p, P, H)) % H for p in range(P)]
    missing = [(slot, p) for p, slot in enumerate(slots) if slot > joined_at and versions_clock[p] < slot]
    return min(missing)[1] if missing else None
