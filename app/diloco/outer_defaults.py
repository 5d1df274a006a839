"""Which outer learning rate and momentum fit a run: a rule of how often its fragments are merged."""

from __future__ import annotations

import math

GAIN = {"adamw": 1.0, "muon": 1.6}
"""η/(1−μ) by inner optimizer: how far Θ goes on in a direction that all rounds agree on."""
MEMORY, SHORTEST, LONGEST = 0.4, 2.0, 10.0
"""Rounds that the momentum remembers: MEMORY · √N, within these bounds."""


def outer_defaults(rounds: float, optimizer: str) -> tuple[float, float]:
    """(η, μ) for a run in which every fragment goes through that many outer rounds, N.

    The momentum remembers 1/(1−μ) = 0.4·√N rounds, 2 to 10; the gain η/(1−μ) is 1 with AdamW inside and 1.6 with Muon,
    whatever M. So with Muon N ≤ 25 gives (0.8, 0.5), N = 66 (0.492, 0.692), N ≥ 625 (0.16, 0.9). A run of few rounds
    cannot wait for a long memory to fill; in a long one it takes the noise out. Found for N = 7, 22 and 66
    (`docs/quality.md`); beyond that it is a guess. An optimizer that is not known counts as AdamW.
    """
    memory = min(max(MEMORY * math.sqrt(max(rounds, 0.0)), SHORTEST), LONGEST)
    return round(GAIN.get(optimizer, GAIN["adamw"]) / memory, 3), round(1 - 1 / memory, 3)
