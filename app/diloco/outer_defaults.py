"""Which outer learning rate and momentum fit a run: a rule of how often its fragments are merged."""

from __future__ import annotations

import math

from app.diloco.settings import DilocoSettings


def outer_defaults(rounds: float, optimizer: str, dials: DilocoSettings) -> tuple[float, float]:
    """(η, μ) for a run in which every fragment goes through that many outer rounds, N.

    The momentum remembers 1/(1−μ) = `outer_memory` · √N rounds, `outer_memory_least` to `outer_memory_most`. The gain
    η/(1−μ), how far Θ goes on in a direction that all rounds agree on, is `outer_gain_muon` or `outer_gain_adamw` by
    the inner optimizer, whatever M. With the defaults (0.4, 2 to 10; 1.6 and 1) and Muon inside N ≤ 25 gives
    (0.8, 0.5), N = 66 (0.492, 0.692), N ≥ 625 (0.16, 0.9). A run of few rounds cannot wait for a long memory to fill;
    in a long one it takes the noise out. Found for N = 7, 22 and 66 (`docs/quality.md`); beyond that it is a guess. An
    optimizer that is not known counts as AdamW, and a memory under one round as one.
    """
    memory = dials.outer_memory * math.sqrt(max(rounds, 0.0))
    memory = max(min(max(memory, dials.outer_memory_least), dials.outer_memory_most), 1.0)
    gain = dials.outer_gain_muon if optimizer == "muon" else dials.outer_gain_adamw
    return round(gain / memory, 3), round(1 - 1 / memory, 3)
