"""Some rows both ways: stepped in virtual time, and by the real actors on a local Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweep.results import ACTORS, ROOT, Job, Line, Results

LRS = {"decoupled_m4_int4": "4e-3", "decoupled_mixed_muon": "12e-3", "decoupled_mixed_muon_gamma0": "12e-3"}
"""Row → learning rate."""
SEED = 0
TIMEOUT_S = 1800.0


def both_ways(results: Results, tokens: int) -> dict[str, tuple[Line, Line]]:
    """Row → its stepped run and its run by the actors, at this budget; what is missing is run and kept."""
    jobs = [Job(row, lr, SEED, tokens) for row, lr in LRS.items()]
    results.fill(jobs)
    found = {}
    for job in jobs:
        stepped, actors = results.of(job), results.of(job, ACTORS)
        assert stepped is not None  # it was filled
        if actors is None:
            actors = _by_actors(job)
            results.add(actors)
        found[job.row] = (stepped, actors)
    return found


def _by_actors(job: Job) -> Line:
    """Train with `python -m app.train`. Raises CalledProcessError when that fails."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "app.train", *job.overrides, f"run.dir={run_dir}"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S, stdout=sys.stderr)
        summary = json.loads((run_dir / "summary.json").read_text())
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    contributors = [len(event["contains"]) for event in events if event["kind"] == "merge"]
    tokens = summary["tokens_processed"]
    return {
        "row": job.row,
        "how": ACTORS,
        "settings": job.settings,
        "loss": summary["eval_loss_final"],
        "bits_per_byte": summary["eval_bits_per_byte"],
        "tokens": tokens,
        "merges": summary["merges"],
        "discarded_share": sum(summary["tokens_discarded"].values()) / tokens,
        "contributors": sum(contributors) / max(1, len(contributors)),
        "tokens_per_s": sum(learner["tokens_per_s"] for learner in summary["learners"].values()),
        "seconds": round(time.monotonic() - started, 1),
    }
