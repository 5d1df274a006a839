"""What a killed learner costs: the default run twice, and once with `chaos=kill_one`, in one call.

    python scripts/bench/kill_one.py [key=value ...]

Prints a table and, last, one JSON line. Wanted: `repeat_ratio` within 2% of 1 (two runs of one configuration),
`kill_ratio` at most 1.03 (eval loss against the undisturbed runs' at the same budget), `gap_ratio` at most 3 (largest
gap between two merges, against the undisturbed run's), `balanced` true. Exits with 1 when one of them is missed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from app.run import tape
from app.run.history import History

ROOT = Path(__file__).resolve().parents[2]
REPEAT_WITHIN, KILL_RATIO, GAP_RATIO, BITS_PER_BYTE = 0.02, 1.03, 3.0, 2.2
RUNS = {"undisturbed": [], "repeated": [], "kill_one": ["chaos=kill_one"]}


def main(overrides: list[str]) -> int:
    """Run, compare, print."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        results = {name: run(Path(folder) / name, [*extra, *overrides]) for name, extra in RUNS.items()}
    plain, repeated, killed = results["undisturbed"], results["repeated"], results["kill_one"]
    for name, result in results.items():
        print(
            f"{name:12} eval loss {result['loss']:.4f}  {result['bits_per_byte']:.4f} bits/byte  "
            f"{result['merges']} merges  largest gap {result['gap_s']:.2f} s  {result['wall_s']:.0f} s"
        )
    for recovery in killed["recoveries"]:
        print("recovery:", ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in recovery["phases"].items()))
    calm = statistics.mean([plain["loss"], repeated["loss"]])
    figures = {
        "repeat_ratio": repeated["loss"] / plain["loss"],
        "kill_ratio": killed["loss"] / calm,
        "gap_ratio": killed["gap_s"] / plain["gap_s"],
        "balanced": all(result["balanced"] for result in results.values()),
        "bits_per_byte": plain["bits_per_byte"],
    }
    met = {
        "repeat_ratio": abs(figures["repeat_ratio"] - 1) <= REPEAT_WITHIN,
        "kill_ratio": figures["kill_ratio"] <= KILL_RATIO,
        "gap_ratio": figures["gap_ratio"] <= GAP_RATIO,
        "balanced": figures["balanced"],
        "bits_per_byte": figures["bits_per_byte"] <= BITS_PER_BYTE,
    }
    missed = [name for name, reached in met.items() if not reached]
    print(json.dumps({**figures, "missed": missed, "results": results}))
    return 1 if missed else 0


def run(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run of the command line; its figures."""
    command = [sys.executable, "-m", "app.train", f"run.dir={folder}", *overrides]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    summary = json.loads((folder / "summary.json").read_text())
    work = summary["work"]
    history = History(tape.read(folder / "events.jsonl")[0])
    return {
        "loss": summary["eval_loss_final"],
        "bits_per_byte": summary["eval_bits_per_byte"],
        "merges": summary["merges"],
        "gap_s": summary["max_merge_gap_s"],
        "wall_s": summary["wall_s"],
        "participation": summary["participation"],
        "balanced": work["processed"] == work["merged"] + sum(work["discarded"].values()),
        "discarded_share": 1 - work["merged"] / work["processed"],
        "recoveries": [{"total_s": r.total_s, "phases": r.phases} for r in history.recoveries()],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
