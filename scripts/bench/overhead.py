"""What the fleet costs a learner: `python scripts/bench/overhead.py [--seconds S]`.

A real run with one learner, and the same inner loop on the same data in a plain process without Ray. Both are pinned
to one core and run in turn for some seconds each (SIGSTOP and SIGCONT); syncer, supervisor and all the rest have the
other core. The last line is JSON: `ratio` is the median, over pairs of windows, of tokens/s with to tokens/s without;
`ratio_cpu` is the same with seconds of CPU time for seconds. Exits with 1 when `ratio` is below 0.95.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    RAY_worker_niceness="0",  # Ray makes its workers nice, and the plain process is not
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)

import ray
import torch

from actors.driver import prepare_run
from actors.spec import SYNCER, RunSpec
from actors.start import start_local_ray, start_supervisor
from app.config import Config, load
from app.learning import data as prepared
from app.learning.blocks import Permutation
from app.learning.inner import InnerLoop
from app.learning.memory import keep_freed_memory
from app.learning.model import build_model
from app.learning.schedule import learning_rate, rejoin_factor
from app.run.folder import open_folder
from live import CALL_S, find, nothing_left
from pace import SETTLE_S, Pace, Runner, of_learner

LEARNER = "learner-0"
NEVER = 10**12
LONG_S = 10**9
WANTED_RATIO = 0.95


def bare_process(config: Config, folder: Path, core: int, stepped: Any) -> None:
    """The loop in a thread beside the main one, as a learner's: memory of the main thread is handled differently."""
    os.setsid()  # as Ray's processes: the kernel shares the cores out by session
    os.sched_setaffinity(0, {core})
    keep_freed_memory()  # as a learner does: the loop is the same
    loop = threading.Thread(target=bare_loop, args=(config, folder, stepped))
    loop.start()
    loop.join()


def bare_loop(config: Config, folder: Path, stepped: Any) -> None:
    """The learner's inner loop alone: same model, data, order and schedule, without Ray, replica or link."""
    torch.set_num_threads(1)
    data, train = prepared.load(folder), config.train
    loop = InnerLoop(build_model(config.model, data.manifest.vocab, config.data.seq_len, config.run.seed), train)
    tokens = 0
    for rows in order(config, len(data.train)):
        batches = list(data.train.take(rows).split(train.batch_size))
        lr = learning_rate(tokens, train) * rejoin_factor(int(stepped[0]), train.rejoin_warmup_steps)
        tokens += loop.step(batches, lr, contextlib.nullcontext()).tokens
        stepped[0], stepped[1] = stepped[0] + 1, time.time()


def order(config: Config, samples: int) -> Iterator[Any]:
    """The samples of one step after the other, int64 [B · accumulation], in the order of the run's permutation."""
    permutation = Permutation(config.run.seed, samples, config.data.block_samples)
    count = config.train.batch_size * config.train.accumulation
    epoch = 0
    while True:
        for block in range(permutation.blocks):
            rows = permutation.indices(epoch, block)
            yield from (rows[i : i + count] for i in range(0, len(rows) - count + 1, count))
        epoch += 1


def start_learner(spec: RunSpec) -> Runner:
    """A run with one learner on a Ray of its own."""
    start_local_ray(spec.config, spec.namespace)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ray.init sets one of its own
    start_supervisor(spec)
    return of_learner(LEARNER, spec)


@contextlib.contextmanager
def start_bare(spec: RunSpec, core: int) -> Iterator[Runner]:
    """The plain process."""
    context = multiprocessing.get_context("spawn")
    stepped = context.Array("d", 2, lock=False)
    process = context.Process(target=bare_process, args=(spec.config, spec.data, core, stepped), daemon=True)
    process.start()
    assert process.pid is not None  # it was started
    try:
        yield Runner(process.pid, lambda: (int(stepped[0]), stepped[1]))
    finally:
        process.kill()
        process.join()


def measure(learner: Runner, bare: Runner, core: int, pairs: int, window_s: float) -> list[tuple[Pace, Pace]]:
    """The paces with and without, in windows that take turns as with, without, without, with, ..."""
    paces = []
    for pair in range(pairs):
        found = {}
        for runner in (learner, bare) if pair % 2 == 0 else (bare, learner):
            with runner.running(core):
                found[runner.pid] = runner.pace(window_s)
        paces.append((found[learner.pid], found[bare.pid]))
        print(f"steps/s with {paces[-1][0].per_s:.2f}, without {paces[-1][1].per_s:.2f}", flush=True)
    return paces


def merges(spec: RunSpec) -> int:
    """Merges of the run by now."""
    return int(ray.get(find(SYNCER, spec).status.remote(), timeout=CALL_S).merges)


def report(config: Config, cores: list[int], paces: list[tuple[Pace, Pace]], merged: int) -> dict[str, Any]:
    """The figures."""
    per_step = config.train.batch_size * config.train.accumulation * config.data.seq_len
    ratios = [with_run.per_s / without.per_s for with_run, without in paces]
    cpu_ratios = [with_run.per_cpu_s / without.per_cpu_s for with_run, without in paces]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "ratio_cpu": round(statistics.median(cpu_ratios), 4),
        "tokens_per_s_with": round(per_step * statistics.median(with_run.per_s for with_run, _ in paces)),
        "tokens_per_s_without": round(per_step * statistics.median(without.per_s for _, without in paces)),
        "windows": len(paces),
        "merges": merged,
        "cores": cores,
    }


def run(seconds: float, window_s: float) -> dict[str, Any]:
    """Start both, measure for about `seconds`, end both."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    os.sched_setaffinity(0, cores[1:])  # whatever is started from here on inherits it
    pairs = max(2, round(seconds / 2 / (window_s + SETTLE_S)))
    with tempfile.TemporaryDirectory() as folder, nothing_left():
        quiet = [f"train.tokens={NEVER}", f"eval.every_tokens={NEVER}", f"diloco.hang_min_s={LONG_S}"]
        config = load(["learners=1", f"run.dir={folder}/run", *quiet])
        spec = prepare_run(config, open_folder(config))
        print("starting a run with one learner ...", flush=True)
        learner = start_learner(spec)
        with learner.running(cores[0]):
            learner.warm_up()
        print("starting the bare loop ...", flush=True)
        with start_bare(spec, cores[0]) as bare:
            with bare.running(cores[0]):
                bare.warm_up()
            before = merges(spec)
            paces = measure(learner, bare, cores[0], pairs, window_s)
            return report(spec.config, cores, paces, merges(spec) - before)


def main() -> None:
    """Print the figures as JSON on the last line."""
    parser = argparse.ArgumentParser(description="What the fleet costs a learner.")
    parser.add_argument("--seconds", type=float, default=180.0, help="seconds of measuring, all windows together")
    parser.add_argument("--window", type=float, default=1.0, help="seconds of one window")
    arguments = parser.parse_args()
    figures = run(arguments.seconds, arguments.window)
    print(json.dumps(figures))
    sys.exit(0 if figures["ratio"] >= WANTED_RATIO else 1)


if __name__ == "__main__":
    main()
