"""Quality at equal tokens: `python scripts/bench/quality.py [--rows NAME,...] [--seeds N] [--tokens N] [--list]`.

Every row is a setting, trained at the same token budget, model and data; a row of the core table gets three paired
seeds (or `--seeds`), the others one. Each row first tries its learning rates with one seed and goes on with its best.
Finished runs are kept in a results file and not run again, so a sweep can go on in pieces. Learners are stepped in turn
in one process (`app/stepped_run.py`). Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Config, load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "quality.jsonl"
DATA = ROOT / "runs" / "quality-data"
TOKENS = 3_276_800
CORE_SEEDS = 3
PROCESSES = 2

BASE = (
    "model.hidden=64",
    "model.heads=2",
    "model.intermediate=172",
    "data.tokenizer=bytes",
    "data.seq_len=64",
    "train.batch_size=8",
    "train.precision=fp32",
)
"""0.1 million parameters on bytes."""
ADAMW_LRS = ("2e-3", "4e-3", "8e-3")
MUON_LRS = ("4e-3", "8e-3", "16e-3")
BASELINE = {"adamw": "data_parallel", "muon": "data_parallel_muon"}


@dataclass(frozen=True)
class Row:
    """One setting."""

    name: str
    overrides: tuple[str, ...] = ()
    optimizer: str = "adamw"
    data_parallel: bool = False
    core: bool = False
    tune: bool = False
    """Tries all learning rates; a row that does not takes the best of the row it varies."""
    like: str = ""
    """The row that it varies."""

    @property
    def lrs(self) -> tuple[str, ...]:
        """Learning rates to try."""
        return ADAMW_LRS if self.optimizer == "adamw" else MUON_LRS


INT4 = ("diloco.codec_up=int4", "diloco.codec_down=int4")
FP4 = ("diloco.codec_up=fp4", "diloco.codec_down=fp4")


def _rows() -> list[Row]:
    rows = []
    for optimizer, suffix in (("adamw", ""), ("muon", "_muon")):
        base = f"decoupled_m4{suffix}"
        rows += [
            Row(f"data_parallel{suffix}", (), optimizer, data_parallel=True, core=True, tune=True),
            Row(base, (), optimizer, core=True, tune=True),
            Row(f"{base}_int4", INT4, optimizer, core=True, like=base),
            Row(f"{base}_fp4", FP4, optimizer, core=optimizer == "adamw", like=base),
            Row(f"decoupled_m2{suffix}_int4", ("learners=2", *INT4), optimizer, core=True, like=base),
        ]
    base = "decoupled_m4"
    rows += [
        Row(f"{base}_bf16", ("diloco.codec_up=bf16", "diloco.codec_down=bf16"), like=base),
        Row(f"{base}_tau0", ("diloco.overlap_steps=0",), like=base),
        Row(f"{base}_tau4", ("diloco.overlap_steps=4",), like=base),
        Row(f"{base}_mix", ("diloco.adopt=mix",), like=base),
        Row(f"{base}_rebase", ("diloco.adopt=rebase",), like=base),
        Row(f"{base}_rebase_int4", ("diloco.adopt=rebase", *INT4), like=base),
        Row(f"{base}_mean", ("diloco.merge=mean",), like=base),
        Row(f"{base}_sgd", ("diloco.outer=sgd",), like=base),
        Row(f"{base}_h8", ("diloco.sync_interval=8", "diloco.overlap_steps=1"), like=base),
        Row("decoupled_m8", ("learners=8",), like=base),
        Row("decoupled_m8_mean", ("learners=8", "diloco.merge=mean"), like=base),
        Row("decoupled_m16", ("learners=16",), like=base),
        Row("decoupled_m16_mean", ("learners=16", "diloco.merge=mean"), like=base),
    ]
    for lr, mu in (("1.0", "0.0"), ("0.7", "0.3"), ("0.7", "0.5"), ("0.3", "0.8"), ("0.7", "0.9")):
        overrides = (f"diloco.outer_lr={lr}", f"diloco.outer_momentum={mu}")
        rows.append(Row(f"{base}_outer_{lr}_{mu}", overrides, like=base))
        rows.append(Row(f"{base}_muon_outer_{lr}_{mu}", overrides, "muon", like=f"{base}_muon"))
    return rows


ROWS = {row.name: row for row in _rows()}


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
        return {"data_parallel": ROWS[self.row].data_parallel, **settings_of(self.config)}

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return config_of(self)


SHAPING = ("learners", "model", "data", "train", "diloco")
"""The parts of a configuration that shape the outcome of a stepped run."""


def settings_of(config: Config) -> dict[str, Any]:
    """The shaping settings by flat key, and the seed."""
    parts = {name: getattr(config, name) for name in SHAPING}
    flat: dict[str, Any] = {"seed": config.run.seed}
    for name, part in parts.items():
        flat |= {f"{name}.{k}": v for k, v in vars(part).items()} if dataclasses.is_dataclass(part) else {name: part}
    return flat


@functools.cache
def config_of(job: Job) -> Config:
    """The configuration of a run."""
    row = ROWS[job.row]
    config = load(
        [
            *BASE,
            f"train.optimizer={row.optimizer}",
            f"train.lr={job.lr}",
            f"train.tokens={job.tokens}",
            f"train.warmup_tokens={job.tokens // 20}",
            f"run.seed={job.seed}",
            *(o for o in row.overrides if o != "diloco.overlap_steps=0"),
        ]
    )
    if "diloco.overlap_steps=0" in row.overrides:  # exists in stepped mode only, so the configuration refuses it
        diloco = dataclasses.replace(config.diloco, overlap_steps=0, min_quorum=config.learners)
        config = dataclasses.replace(config, diloco=diloco)
    return config


def run(job: Job) -> dict[str, Any]:
    """Train; one line of the results file."""
    import torch

    from app import stepped_run

    torch.set_num_threads(1)
    started = time.monotonic()
    train = stepped_run.train_data_parallel if ROWS[job.row].data_parallel else stepped_run.train_decoupled
    outcome = train(job.config, DATA)
    seconds = round(time.monotonic() - started, 1)
    return {"row": job.row, "settings": job.settings, **dataclasses.asdict(outcome), "seconds": seconds}


class Results:
    """The finished runs, kept in a file and known by their settings: a row may change its name, or share its runs."""

    def __init__(self, path: Path):
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._lines: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._defaults = settings_of(Config())

    def of(self, job: Job) -> dict[str, Any] | None:
        """The finished run, if there is one. A setting that did not exist then had its default's effect."""
        wanted = job.settings
        for line in self._lines:
            then = {key: line["settings"].get(key, self._defaults.get(key)) for key in wanted}
            if then == wanted:
                return line
        return None

    def add(self, result: dict[str, Any]) -> None:
        """Keep one more."""
        self._lines.append(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def fill(self, jobs: list[Job]) -> None:
        """Run those that are missing, some at a time."""
        missing = [job for job in dict.fromkeys(jobs) if self.of(job) is None]
        if not missing:
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            for done in as_completed([pool.submit(run, job) for job in missing]):
                result = done.result()
                self.add(result)
                settings = result["settings"]
                print(
                    f"{result['row']} lr={settings['train.lr']} seed={settings['seed']}: loss {result['loss']:.4f} "
                    f"in {result['seconds']:.0f} s",
                    flush=True,
                )

    def best_lr(self, row: Row, tokens: int) -> str:
        """The learning rate of the lowest loss with seed 0 of the row, or of the row that it varies."""
        tuned = row if row.tune else ROWS[row.like]
        losses = {lr: run["loss"] for lr in tuned.lrs if (run := self.of(Job(tuned.name, lr, 0, tokens))) is not None}
        return min(losses, key=lambda lr: losses[lr])


def sweep(results: Results, rows: list[Row], seeds: int | None, tokens: int) -> None:
    """Learning rates first, then the seeds of each row."""
    tuned = {row.name if row.tune else row.like for row in rows}
    results.fill([Job(name, lr, 0, tokens) for name in sorted(tuned) for lr in ROWS[name].lrs])
    results.fill([job for row in rows for job in jobs_of(results, row, seeds, tokens)])


def jobs_of(results: Results, row: Row, seeds: int | None, tokens: int) -> list[Job]:
    """The runs of a row at its learning rate."""
    count = seeds or (CORE_SEEDS if row.core else 1)
    lr = results.best_lr(row, tokens)
    return [Job(row.name, lr, seed, tokens) for seed in range(count)]


def baseline_lr(results: Results, baseline: Row, tokens: int) -> list[str]:
    """Its best learning rate; none before it was tuned."""
    try:
        return [results.best_lr(baseline, tokens)]
    except ValueError:
        return []


def figures(results: Results, row: Row, seeds: int | None, tokens: int) -> dict[str, Any]:
    """A row's figures."""
    runs = [run for job in jobs_of(results, row, seeds, tokens) if (run := results.of(job)) is not None]
    baseline = ROWS[BASELINE[row.optimizer]]
    pairs = [
        (run["loss"], base["loss"])
        for run in runs
        for lr in baseline_lr(results, baseline, tokens)
        if (base := results.of(Job(baseline.name, lr, run["settings"]["seed"], tokens))) is not None
    ]
    gaps = [100 * (loss / base - 1) for loss, base in pairs]
    return {
        "lr": runs[0]["settings"]["train.lr"],
        "losses": {run["settings"]["seed"]: run["loss"] for run in runs},
        "gap_percent": statistics.mean(gaps) if gaps else None,
        "gap_error": statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
        "tokens": runs[0]["tokens"],
        "merges": runs[0]["merges"],
        "discarded_share": statistics.mean(run["discarded_share"] for run in runs),
        "contributors": statistics.mean(run["contributors"] for run in runs),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| row | lr | eval loss | against data parallel | merges | discarded |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        losses = list(row["losses"].values())
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        error = f" ± {row['gap_error']:.2f}" if row["gap_error"] is not None else ""
        gap = "" if row["gap_percent"] is None else f"{row['gap_percent']:+.2f}%{error}"
        lines.append(
            f"| {name} | {row['lr']} | {statistics.mean(losses):.4f}{spread} | {gap} | {row['merges']} "
            f"| {row['discarded_share']:.1%} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run what is missing, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description="Quality at equal tokens.")
    parser.add_argument("--rows", help="names, separated by commas; all by default")
    parser.add_argument("--seeds", type=int, help="seeds of every row")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="token budget of every run")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ROWS))
        return 0
    names = arguments.rows.split(",") if arguments.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        print(f"error: --rows {','.join(unknown)}: no such row; --list names them", file=sys.stderr)
        return 2
    results = Results(RESULTS)
    rows = [ROWS[name] for name in names]
    sweep(results, rows, arguments.seeds, arguments.tokens)
    found = {row.name: figures(results, row, arguments.seeds, arguments.tokens) for row in rows}
    print(table(found))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
