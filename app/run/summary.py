"""`summary.json`: the run in figures."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

from app.run.facts import STATUSES, LearnerFacts, RunFacts
from app.run.figures import data_parallel_bytes, goodput, max_gap, participation, tokens_by_fate, uptime
from app.run.lines import finite
from app.run.storage import Store

NAME = "summary.json"

_PACKAGES = (
    "decoupled-diloco",
    "torch",
    "ray",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "numpy",
    "fsspec",
    "wandb",
)


class SummaryDamaged(ValueError):
    """What stands where the summary should is none."""


def summarise(facts: RunFacts) -> dict[str, Any]:
    """The content of `summary.json`. `work` holds the exact integers, in token × parameter units.

    Raises:
        ValueError: an unknown status.
    """
    if facts.status not in STATUSES:
        raise ValueError(f"status {facts.status!r}: allowed are {', '.join(STATUSES)}")
    fates = tokens_by_fate(facts.balance)
    steps = sum(learner.steps for learner in facts.learners.values())
    return {
        "status": facts.status,
        "tokens_budget": facts.tokens_budget,
        "tokens_processed": facts.balance.processed // facts.balance.parameters,
        "tokens_merged": fates.pop("merged"),
        "tokens_discarded": {reason: fates[reason] for reason in sorted(facts.balance.discarded)},
        "merges": facts.versions_made,
        "global_step": facts.global_step,
        "eval_loss_first": facts.evals[0].loss if facts.evals else None,
        "eval_loss_final": facts.evals[-1].loss if facts.evals else None,
        "eval_bits_per_byte": facts.evals[-1].bits_per_byte if facts.evals else None,
        "wall_s": facts.ended_at - facts.started_at,
        "goodput": _goodput(facts),
        "uptime": _uptime(facts),
        "participation": participation(facts.merges),
        "max_merge_gap_s": max_gap([merge.at for merge in facts.merges]),
        "learners": {name: _learner(learner) for name, learner in sorted(facts.learners.items())},
        "syncer": {
            "incarnations": facts.syncer.incarnations,
            "cpu_s": facts.syncer.cpu_s,
            "merge_s": facts.syncer.merge_s,
            "recoveries_s": list(facts.syncer.recoveries_s),
        },
        "bytes": {
            "up": facts.bytes.up,
            "down": facts.bytes.down,
            "up_fp32": facts.bytes.up_fp32,
            "down_fp32": facts.bytes.down_fp32,
            "data_parallel": data_parallel_bytes(facts.balance.parameters, max(1, len(facts.learners)), steps),
        },
        "faults": [
            {"kind": f.kind, "target": f.target, "at_s": f.at_s, "recovered_s": f.recovered_s} for f in facts.faults
        ],
        "samples": facts.samples,
        "versions": facts.versions,
        "work": {
            "parameters": facts.balance.parameters,
            "processed": facts.balance.processed,
            "merged": facts.balance.merged,
            "discarded": dict(sorted(facts.balance.discarded.items())),
            "outstanding": facts.balance.outstanding,
            "balanced": facts.balance.exact,
        },
    }


def write_summary(store: Store, summary: dict[str, Any]) -> None:
    """Put `summary.json` into the run folder, atomically.

    NaN and infinities (the loss of a model that diverged) become null, as JSON has no word for them.
    """
    store.write(NAME, (json.dumps(finite(summary), indent=2, allow_nan=False) + "\n").encode())


def read_summary(store: Store) -> dict[str, Any]:
    """The run folder's summary.

    Raises:
        FileNotFoundError: there is none yet.
        SummaryDamaged: what is there is none.
    """
    try:
        summary = json.loads(store.text(NAME))
    except (ValueError, RecursionError) as error:
        raise SummaryDamaged(f"{NAME}: {error}") from error
    if not isinstance(summary, dict) or summary.get("status") not in STATUSES:
        raise SummaryDamaged(f"{NAME} has no status")
    if not isinstance(summary.get("tokens_processed"), int):
        raise SummaryDamaged(f"{NAME} has no tokens_processed")
    return summary


def run_versions() -> dict[str, str]:
    """Python's version and that of every installed package that a result depends on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _learner(learner: LearnerFacts) -> dict[str, Any]:
    return {
        "pool": learner.pool,
        "incarnations": learner.incarnations,
        "steps": learner.steps,
        "tokens": learner.tokens,
        "tokens_per_s": learner.tokens / learner.step_s if learner.step_s > 0 else 0.0,
        "recoveries_s": list(learner.recoveries_s),
    }


def _goodput(facts: RunFacts) -> float | None:
    processed = facts.balance.processed
    return goodput(
        step_s=sum(learner.step_s for learner in facts.learners.values()),
        merged_share=facts.balance.merged / processed if processed else 0.0,
        allocated_s=sum(learner.allocated_s for learner in facts.learners.values()),
    )


def _uptime(facts: RunFacts) -> float | None:
    if facts.first_step_at is None:
        return None
    end = facts.ended_at if facts.budget_at is None else facts.budget_at
    intervals = [interval for learner in facts.learners.values() for interval in learner.stepping]
    return uptime(intervals, facts.first_step_at, end)
