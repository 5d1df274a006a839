"""What a slow pool costs a fast one: `python scripts/bench/two_pools.py [--seconds S]`.

A real run with two pools of one learner each, one three times slower (it sleeps after each step). The fast learner is
pinned to one core; the slow one, the syncer, the supervisor and all the rest have the other. The slow learner is
stopped (SIGSTOP) in every second window. The last line is JSON: `ratio` is the median, over pairs of windows, of the
fast learner's tokens/s beside the slow one to those without it. Exits with 1 when `ratio` is below 0.97.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from typing import Any

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    RAY_worker_niceness="0",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)

from actors.driver import prepare_run
from actors.spec import RunSpec
from actors.start import start_local_ray, start_supervisor
from app.config import load
from app.run import tape
from app.run.folder import open_folder
from live import nothing_left
from pace import SETTLE_S, Runner, of_learner, pin

FAST, SLOW = "learner-0", "learner-1"
NEVER = 10**12
LONG_S = 10**9
"""Nobody is replaced for standing still."""
WANTED_RATIO = 0.97
POOLS = ("learners=2", "+pools.slow.min_learners=1", "+pools.slow.slowdown=3")


def main() -> int:
    """Print the figures as JSON on the last line."""
    parser = argparse.ArgumentParser(description="What a slow pool costs a fast one.")
    parser.add_argument("--seconds", type=float, default=180.0, help="seconds of measuring, all windows together")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of one window")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    os.sched_setaffinity(0, cores[1:])  # whatever is started from here on inherits it
    pairs = max(2, round(arguments.seconds / 2 / (arguments.window + SETTLE_S)))
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, nothing_left():
        quiet = [f"train.tokens={NEVER}", f"eval.every_tokens={NEVER}", f"diloco.hang_min_s={LONG_S}"]
        config = load([f"run.dir={folder}/run", *POOLS, *quiet])
        spec = prepare_run(config, open_folder(config))
        start_local_ray(spec.config, spec.namespace)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ray.init sets one of its own
        start_supervisor(spec)
        figures = measure(spec, cores[0], pairs, arguments.window)
    print(json.dumps(figures))
    return 0 if figures["ratio"] >= WANTED_RATIO else 1


def measure(spec: RunSpec, core: int, pairs: int, window_s: float) -> dict[str, Any]:
    """The figures of windows that take turns as beside, alone, alone, beside, ..."""
    fast, slow = of_learner(FAST, spec), of_learner(SLOW, spec)
    pin(fast.pid, core)
    for learner in (fast, slow):
        learner.warm_up()
    beside: list[float] = []
    alone: list[float] = []
    for pair in range(pairs):
        for stopped in (False, True) if pair % 2 == 0 else (True, False):
            (alone if stopped else beside).append(_window(fast, slow, core, stopped, window_s))
        print(f"steps/s beside the slow one {beside[-1]:.2f}, alone {alone[-1]:.2f}", flush=True)
    ratios = [with_slow / without for with_slow, without in zip(beside, alone, strict=True)]
    train, merges = spec.config.train, [event for event in tape.read(spec.tape)[0] if event["kind"] == "merge"]
    per_step = train.batch_size * train.accumulation * spec.config.data.seq_len
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "tokens_per_s_beside": round(per_step * statistics.median(beside)),
        "tokens_per_s_alone": round(per_step * statistics.median(alone)),
        "windows": pairs,
        "merges": len(merges),
        "merges_of_both": sum(len(event["contains"]) == 2 for event in merges),
    }


def _window(fast: Runner, slow: Runner, core: int, stopped: bool, window_s: float) -> float:
    pin(fast.pid, core)
    if stopped:
        os.kill(slow.pid, signal.SIGSTOP)
    try:
        return fast.pace(window_s).per_s
    finally:
        os.kill(slow.pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
