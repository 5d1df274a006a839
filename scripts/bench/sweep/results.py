"""Finished runs: known by all settings that shape their outcome, kept in a file, never made twice."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Config, load
from app.stepped_run import Schedule, train_data_parallel, train_decoupled
from sweep.rows import CORE_SEEDS, ROWS, Row

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "runs" / "quality-data"
PROCESSES = 2
SHAPING = ("learners", "model", "data", "train", "diloco")
"""The parts of a configuration that shape the outcome of a stepped run, beside the pools."""
OF_DATA_PARALLEL = ("diloco.average", "diloco.average_last", "diloco.last_round", "diloco.sync_interval")
"""The dials of the algorithm that data parallel has."""
STEPPED, ACTORS = "stepped", "actors"
"""How a run was made: in virtual time in one process, or by the real actors."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run."""

    row: str
    lr: str
    seed: int
    tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the outcome depends on, by flat key: what a finished run is known by."""
        row = ROWS[self.row]
        settings = {"data_parallel": row.data_parallel, **settings_of(config_of(self), row.schedule)}
        if row.optimizer != "muon":
            del settings["train.muon_momentum"]
        if not row.schedule.borrowed:
            del settings["schedule.borrowed_from"], settings["schedule.borrowed_until"]
        if row.data_parallel:
            settings = {k: v for k, v in settings.items() if not k.startswith("diloco.") or k in OF_DATA_PARALLEL}
        return settings

    @property
    def overrides(self) -> list[str]:
        """What `load` and `python -m app.train` take."""
        return [
            *ROWS[self.row].all_overrides,
            f"train.lr={self.lr}",
            f"train.tokens={self.tokens}",
            f"train.warmup_tokens={self.tokens // 20}",
            f"run.seed={self.seed}",
        ]


def settings_of(config: Config, schedule: Schedule) -> dict[str, Any]:
    """The shaping settings by flat key, the seed, and how time passes."""
    parts = {name: getattr(config, name) for name in SHAPING} | {"schedule": schedule}
    flat: dict[str, Any] = {"seed": config.run.seed, "pools": _special_pools(config)}
    for name, part in parts.items():
        flat |= {f"{name}.{k}": v for k, v in vars(part).items()} if dataclasses.is_dataclass(part) else {name: part}
    return flat


def _special_pools(config: Config) -> list[dict[str, Any]] | None:
    """What is special about the learners of each pool; None when nothing is."""
    pools = [
        {
            "learners": config.pool_sizes[name],
            "slowdown": pool.slowdown,
            "batch_size": pool.batch_size,
            "accumulation": pool.accumulation,
            "precision": pool.precision,
        }
        for name, pool in config.pools.items()
    ]
    plain = {"slowdown": 1.0, "batch_size": None, "accumulation": None, "precision": None}
    return None if all(pool | plain == pool for pool in pools) else pools


@functools.cache
def config_of(job: Job) -> Config:
    """The configuration of a run."""
    return load(job.overrides)


def run(job: Job) -> Line:
    """Train; one line of the results file."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    row = ROWS[job.row]
    train = train_data_parallel if row.data_parallel else train_decoupled
    outcome = train(config_of(job), DATA, row.schedule)
    seconds = round(time.monotonic() - started, 1)
    return {"row": job.row, "how": STEPPED, "settings": job.settings, **dataclasses.asdict(outcome), "seconds": seconds}


class Results:
    """The results file. A row may change its name, or share its runs."""

    def __init__(self, path: Path):
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._lines: list[Line] = [json.loads(line) for line in lines]
        self._defaults = settings_of(Config(), Schedule())

    def of(self, job: Job, how: str = STEPPED) -> Line | None:
        """The run with these settings that was made this way, if there is one.

        A setting that did not exist when it ran had the effect of its default.
        """
        wanted = job.settings
        for line in self._lines:
            then = {key: line["settings"].get(key, self._defaults.get(key)) for key in wanted}
            if line.get("how", STEPPED) == how and then == wanted:
                return line
        return None

    def add(self, line: Line) -> None:
        """Keep one more."""
        self._lines.append(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def fill(self, jobs: Sequence[Job]) -> None:
        """Run those that are missing, some at a time."""
        missing: dict[str, Job] = {}
        for job in jobs:
            if self.of(job) is None:
                missing.setdefault(json.dumps(job.settings, sort_keys=True), job)
        if not missing:
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            for done in as_completed([pool.submit(run, job) for job in missing.values()]):
                line = done.result()
                self.add(line)
                print(told(line), flush=True)

    def best_lr(self, row: Row, tokens: int) -> str | None:
        """The learning rate of the lowest loss with seed 0 of the row, or of the row that it varies.

        None before all were tried. `tokens`, here and below: the budget of the core table.
        """
        if not row.tune:
            return self.best_lr(ROWS[row.like], tokens)
        lines = {job.lr: self.of(job) for job in learning_rates(row, tokens)}
        losses = {lr: line["loss"] for lr, line in lines.items() if line is not None}
        if len(losses) < len(row.lrs):
            return None
        return min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf)

    def jobs_of(self, row: Row, seeds: int | None, tokens: int) -> list[Job]:
        """The runs of a row at its learning rate; none before that is known."""
        count = seeds or row.seeds
        lr = self.best_lr(row, tokens)
        return [] if lr is None else [job_of(row, lr, seed, tokens) for seed in range(count)]

    def losses(self, row: Row, tokens: int, seeds: int | None = None) -> dict[int, float]:
        """Seed → loss at the row's learning rate, of those (by default `CORE_SEEDS`) that ran."""
        lines = (self.of(job) for job in self.jobs_of(row, seeds or CORE_SEEDS, tokens))
        return {line["settings"]["seed"]: line["loss"] for line in lines if line is not None}


def told(line: Line) -> str:
    """One line about a run that is done."""
    lr, seed = line["settings"]["train.lr"], line["settings"]["seed"]
    return f"{line['row']} lr={lr} seed={seed}: loss {line['loss']:.4f} in {line['seconds']:.0f} s"


def job_of(row: Row, lr: str, seed: int, tokens: int) -> Job:
    """A run of the row with its share of the budget."""
    return Job(row.name, lr, seed, math.ceil(tokens * row.share))


def learning_rates(row: Row, tokens: int) -> list[Job]:
    """The runs that find the row's learning rate."""
    return [job_of(row, lr, 0, tokens) for lr in row.lrs]


def tuned(row: Row) -> Row:
    """The row whose learning rate this one takes: itself, or one that it varies."""
    return row if row.tune else tuned(ROWS[row.like])


def sweep(results: Results, rows: Sequence[Row], seeds: int | None, tokens: int) -> None:
    """Learning rates first, then the seeds of each row."""
    names = sorted({tuned(row).name for row in rows})
    results.fill([job for name in names for job in learning_rates(ROWS[name], tokens)])
    results.fill([job for row in rows for job in results.jobs_of(row, seeds, tokens)])
