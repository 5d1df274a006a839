"""How soon a group is back: `python scripts/bench/group_restart.py [--learners M --workers W --strikes N] [KEY=VALUE]`.

A real run of M learners with W workers each. One worker after the other of the last learner is killed, rank 1 first,
and Ray starts the group anew. Before each strike the group is stopped (SIGSTOP) and, under the load of the others, W
bare starts are made at once: processes that import torch and transformers and build the model. Prints a line for each
and, last, one JSON line: seconds from a strike to the first step and to the first merged contribution, medians, and
`ratio`, that of the first step to a bare start. Exits with 1 when `ratio` is above 1.5, or when another learner was
struck, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
from ray.exceptions import RayError

from actors.driver import prepare_run
from actors.learner import LearnerStatus
from actors.spec import RunSpec
from actors.start import start_local_ray, start_supervisor
from app.config import load
from app.run import tape
from app.run.folder import open_folder
from live import CALL_S, find, nothing_left, wait
from options import positive
from storming.runs import BARE_START, ROOT

NEVER = 10**12
LONG_S = 10**6
"""Nobody is replaced for standing still."""
WANTED_RATIO = 1.5


def main() -> int:
    """Run, strike, print."""
    arguments = _arguments()
    pool = [f"pools.local.workers_per_learner={arguments.workers}", *arguments.overrides]
    quiet = [f"train.tokens={NEVER}", f"eval.every_tokens={NEVER}", f"diloco.hang_min_s={LONG_S}"]
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, nothing_left():
        config = load([f"learners={arguments.learners}", f"run.dir={folder}/run", *pool, *quiet])
        spec = prepare_run(config, open_folder(config))
        start_local_ray(spec.config, spec.namespace)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ray.init sets one of its own
        start_supervisor(spec)
        for learner in config.learner_ids:
            wait(f"{learner} trains", partial(stepping, spec, learner, 0, arguments.workers))
        figures = measure(spec, arguments.workers, arguments.strikes)
    print(json.dumps(figures))
    return 0 if figures["ratio"] <= WANTED_RATIO and figures["others_struck"] == 0 else 1


def measure(spec: RunSpec, workers: int, strikes: int) -> dict[str, Any]:
    """The figures of all strikes."""
    *others, victim = spec.config.learner_ids
    steps, merges, bare = [], [], []
    for number in range(strikes):
        status = stepping(spec, victim, 0, workers)
        assert status is not None  # it was waited for
        pids = [status.pid, *(rank.pid for rank in status.ranks)]
        bare.append(bare_starts(pids))
        rank = (number + 1) % workers
        struck = time.time()
        os.kill(pids[rank], signal.SIGKILL)
        back = wait("it steps again", partial(stepping, spec, victim, status.incarnation, workers))
        steps.append(back.stepped_at - struck)
        merges.append(wait("its work is merged", partial(merged_at, spec, back)) - struck)
        line = f"rank {rank} killed: first step after {steps[-1]:.1f} s, first merge after {merges[-1]:.1f} s"
        print(f"{line}; {workers} bare starts {bare[-1]:.1f} s", flush=True)
    found = [stepping(spec, learner, 0, workers) for learner in others]
    return {
        "ratio": statistics.median(steps) / statistics.median(bare),
        "ratio_merged": statistics.median(merges) / statistics.median(bare),
        "first_step_s": statistics.median(steps),
        "first_merge_s": statistics.median(merges),
        "bare_start_s": statistics.median(bare),
        "first_steps_s": steps,
        "first_merges_s": merges,
        "bare_starts_s": bare,
        "others_struck": sum(status is None or status.incarnation > 1 for status in found),
        "learners": len(others) + 1,
        "workers": workers,
        "sharded": spec.config.pools["local"].sharded,
        "preload": spec.config.run.preload,
    }


def stepping(spec: RunSpec, learner: str, after: int, workers: int) -> LearnerStatus | None:
    """The learner's status, if it has stepped under an incarnation after that one, and all its workers are known."""
    try:
        status: LearnerStatus = ray.get(find(learner, spec).status.remote(), timeout=CALL_S)
    except (RayError, TimeoutError):
        return None
    return status if status.incarnation > after and status.steps > 0 and len(status.ranks) == workers - 1 else None


def merged_at(spec: RunSpec, back: LearnerStatus) -> float | None:
    """When a version first held work of this incarnation, Unix time."""
    who = (back.learner, back.incarnation)
    events = [e for e in tape.read(spec.tape)[0] if e["kind"] == "first_merge"]
    return next((float(e["at"]) for e in events if (e["learner"], e["incarnation"]) == who), None)


def bare_starts(stopped: list[int]) -> float:
    """Seconds that as many bare starts take at once, while these processes stand still."""
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        started = [
            subprocess.Popen([sys.executable, "-c", BARE_START], cwd=ROOT, stdout=subprocess.DEVNULL) for _ in stopped
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise RuntimeError("a bare start has failed")
        return time.monotonic() - began
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=positive, default=2, help="2 by default")
    parser.add_argument("--workers", type=positive, default=2, help="workers of each; 2 by default")
    parser.add_argument("--strikes", type=positive, default=4, help="4 by default")
    parser.add_argument("overrides", nargs="*", help="for example pools.local.sharded=true, run.preload=false")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
