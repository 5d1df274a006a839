"""What optimizer state is worth to a learner that comes back: `python scripts/bench/rejoin.py [--tokens N --seeds N]`.

Stepped runs of four learners in virtual time, one of which dies now and then, are the same but for `train.recovery`. Of
each start of a learner in a run under way: its training loss above the mean of the others' at that moment. Prints a
table and, last, one JSON line: policy → excess by steps after the rejoin, and the eval loss at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from app.config import load
from app.stepped_run import Schedule, train_decoupled
from options import positive
from sweep.rows import SMALL

DATA = Path(__file__).resolve().parents[2] / "runs" / "quality-data"
POLICIES = {
    "peer": ("train.recovery=peer",),
    "checkpoint": ("train.recovery=checkpoint",),
    "fresh": ("train.recovery=fresh",),
    "fresh, no warm-up": ("train.recovery=fresh", "train.rejoin_warmup_steps=0"),
}
WINDOWS = ((1, 5), (6, 20), (21, 50))
"""Steps after a rejoin, first and last."""
KILL_EVERY_S = 20.0


@dataclass
class Excess:
    """Losses of learners that came back, above those of the others."""

    newest: dict[str, float] = field(default_factory=dict)
    found: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def step(self, learner: str, incarnation: int, steps: int, loss: float) -> None:
        """A learner has made a step."""
        others = [newest for name, newest in self.newest.items() if name != learner]
        for window in WINDOWS:
            if incarnation > 1 and others and window[0] <= steps <= window[1]:
                self.found[window].append(loss - statistics.mean(others))
        self.newest[learner] = loss


def main() -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description="What the optimizer state is worth after a rejoin.")
    parser.add_argument("--tokens", type=positive, default=1_638_400)
    parser.add_argument("--seeds", type=positive, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures, rows = {}, []
    for policy, overrides in POLICIES.items():
        excess, losses = Excess(), []
        for seed in range(arguments.seeds):
            dials = [f"train.tokens={arguments.tokens}", f"train.warmup_tokens={arguments.tokens // 20}"]
            config = load([*SMALL, *overrides, *dials, f"run.seed={seed}"])
            schedule = Schedule(kill_every_s=KILL_EVERY_S)
            losses.append(train_decoupled(config, DATA, schedule, excess.step).loss)
        if any(not excess.found[window] for window in WINDOWS):
            parser.error("--tokens: too few for a learner to die, come back and step")
        by_window = {f"{low}-{high}": statistics.mean(excess.found[low, high]) for low, high in WINDOWS}
        cells = " | ".join(f"{value:+.3f}" for value in by_window.values())
        rows.append(f"| {policy} | {cells} | {statistics.mean(losses):.4f} |")
        figures[policy] = {"excess": by_window, "eval_loss": statistics.mean(losses), "eval_losses": losses}
    print("| policy | " + " | ".join(f"steps {low} to {high}" for low, high in WINDOWS) + " | eval loss |")
    print("|---|" + "---|" * (len(WINDOWS) + 1))
    print("\n".join(rows))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
