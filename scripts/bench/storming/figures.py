"""What a storm cost: figures of the stormy run beside those of the calm one."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from app.run import tape
from app.run.final_report import PHASES
from app.run.folder import TAPE
from app.run.history import History
from app.run.storage import open_store
from app.run.summary import read_summary
from storming.runs import Finished, Storm, median

KILLS = ("kill", "kill_worker", "preempt", "kill_site")
"""Faults that cost the start of a process."""
GOODPUT_SHARE, PARTICIPATION, LOSS_RATIO, RECOVERY_RATIO, HOURLY, GAPS = 0.97, 0.9, 1.02, 1.5, 125.0, 3.0
"""What must hold; the last one where a site goes dark: its gap in merges, in usual ones."""
HOUR_S = 3600.0
COMPARED = (
    "eval_loss", "goodput", "tokens_per_s", "uptime", "downtime_s", "max_merge_gap_s", "usual_merge_gap_s",
    "goodput_ratio", "goodput_ratio_bound", "participation", "restart_cpu_s", "bare_start_s",
)  # fmt: skip
"""Rows of the last table."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A finished run, read."""

    finished: Finished
    summary: dict[str, Any]
    history: History

    @classmethod
    def of(cls, finished: Finished) -> Run:
        """Read its files. Raises RuntimeError when it failed."""
        if finished.code:
            raise RuntimeError(f"the run has failed with {finished.code}: {finished.folder.with_suffix('.log')}")
        history = History(tape.read(finished.folder / TAPE)[0])
        return cls(finished, read_summary(open_store(str(finished.folder))), history)

    @property
    def training_s(self) -> float:
        """From the first step to the budget."""
        first, last = self.history.first_step_at(), self.history.budget_at()
        assert first is not None  # it has completed
        assert last is not None
        return last - first

    @property
    def merged_per_s(self) -> float:
        """Merged tokens a second."""
        return float(self.summary["tokens_merged"]) / self.training_s

    @property
    def usual_gap_s(self) -> float | None:
        """Median time between two merges."""
        times = sorted(event["at"] for event in self.history.of("merge"))
        return median([after - before for before, after in pairwise(times)])

    @property
    def balanced(self) -> bool:
        """Whether every token has one fate, and every sample is used once or came back."""
        work, samples = self.summary["work"], self.summary["samples"]
        fates = work["merged"] + sum(work["discarded"].values()) + work["outstanding"]
        whole = samples is not None and samples["issued"] == samples["used"] + samples["returned"]
        return bool(work["processed"] == fates and whole)


def beside(rival: Run) -> Figures:
    """What the rival made of the same storm."""
    summary = rival.summary
    return {
        "rival_seconds": rival.training_s,
        "rival_faults": len(summary["faults"]),
        "rival_tokens_per_s": rival.merged_per_s,
        "rival_goodput": summary["goodput"],
        "rival_uptime": summary["uptime"],
        "rival_downtime_s": None if summary["uptime"] is None else (1 - summary["uptime"]) * rival.training_s,
        "rival_eval_loss": summary["eval_loss_final"],
    }


def figures(storm: Storm, calm: Run, rough: Run) -> Figures:
    """The figures of the JSON line."""
    faults = rough.summary["faults"]
    kills = [fault for fault in faults if fault["kind"] in KILLS]
    recovered = [fault["recovered_s"] for fault in kills if fault["recovered_s"] is not None]
    restarts = [event["cpu_s"] for event in rough.history.of("join") if event["incarnation"] > 1]
    restart_cpu_s = median(restarts) or 0.0
    cores = os.cpu_count() or 1
    share = 1 - len(kills) * restart_cpu_s / (cores * rough.training_s)
    return {
        "seconds": rough.training_s,
        "faults": len(faults),
        "faults_per_hour": HOUR_S * len(faults) / rough.training_s,
        "kills": len(kills),
        "recovered": len(recovered),
        "recovery_s": median(recovered),
        "recovery_p90_s": _p90(recovered),
        "bare_start_s": median(list(rough.finished.bare_starts_s)),
        "restarts": len(restarts),
        "restart_cpu_s": restart_cpu_s,
        "goodput_ratio": rough.merged_per_s / calm.merged_per_s,
        "goodput_ratio_bound": GOODPUT_SHARE * share,
        "tokens_per_s": rough.merged_per_s,
        "downtime_s": (1 - (rough.summary["uptime"] or 0.0)) * rough.training_s,
        "goodput": rough.summary["goodput"],
        "goodput_fault_free": calm.summary["goodput"],
        "uptime": rough.summary["uptime"],
        "participation": rough.summary["participation"],
        "max_merge_gap_s": rough.summary["max_merge_gap_s"],
        "usual_merge_gap_s": rough.usual_gap_s,
        "usual_merge_gap_s_fault_free": calm.usual_gap_s,
        "max_merge_gap_s_fault_free": calm.summary["max_merge_gap_s"],
        "eval_loss": rough.summary["eval_loss_final"],
        "eval_loss_fault_free": calm.summary["eval_loss_final"],
        "ledger_balanced": rough.balanced,
        "samples_reissued": (rough.summary["samples"] or {}).get("reissued"),
        "left_behind": rough.finished.left_behind,
        "learners": storm.learners,
        "seed": storm.seed,
    }


def missed(storm: Storm, found: Figures) -> list[str]:
    """Names of the figures that are not what they must be."""
    bare = found["bare_start_s"]
    met = {
        "faults_per_hour": storm.dark_s is not None or found["faults_per_hour"] >= min(HOURLY, storm.rate),
        "max_merge_gap_s": storm.dark_s is None or found["max_merge_gap_s"] <= GAPS * found["usual_merge_gap_s"],
        "recovery_s": bare is None or (found["recovery_s"] or 0.0) <= RECOVERY_RATIO * bare,
        "goodput_ratio": found["goodput_ratio"] >= found["goodput_ratio_bound"],
        "uptime": found["uptime"] == 1.0,
        "participation": found["participation"] >= PARTICIPATION,
        "eval_loss": found["eval_loss"] <= LOSS_RATIO * found["eval_loss_fault_free"],
        "ledger_balanced": found["ledger_balanced"],
        "left_behind": found["left_behind"] == 0,
    }
    return [name for name, reached in met.items() if not reached]


def table(rough: Run, found: Figures) -> str:
    """Markdown: faults by kind with their recoveries, the phases of a restart, and the two runs side by side."""
    by_kind = Counter(fault["kind"] for fault in rough.summary["faults"])
    lines = ["| fault | times | got over | seconds, median | 90% |", "|---|---|---|---|---|"]
    for kind, count in sorted(by_kind.items()):
        times = [f["recovered_s"] for f in rough.summary["faults"] if f["kind"] == kind]
        known = [seconds for seconds in times if seconds is not None]
        lines.append(f"| {kind} | {count} | {len(known)} | {_told(median(known))} | {_told(_p90(known))} |")
    phases = [r.phases for r in rough.history.recoveries() if r.kind in KILLS and r.phases]
    lines += ["", "| restart | " + " | ".join(PHASES) + " |", "|---|" + "---|" * len(PHASES)]
    for name, figure in (("median", median), ("90%", _p90)):
        cells = [_told(figure([p[phase] for p in phases if phase in p])) for phase in PHASES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| | storm | calm | rival in the storm |", "|---|---|---|---|"]
    for key in COMPARED:
        values = (found.get(name) for name in (key, f"{key}_fault_free", f"rival_{key}"))
        lines.append(f"| {key} | " + " | ".join("" if value is None else _told(value, 4) for value in values) + " |")
    discarded = rough.summary["tokens_discarded"]
    fates = ", ".join(f"{reason} {tokens:,}" for reason, tokens in discarded.items() if tokens)
    lines.append(f"| tokens | merged {rough.summary['tokens_merged']:,}; discarded: {fates or 'none'} | | |")
    return "\n".join(lines)


def _p90(values: list[float]) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)] if ordered else None


def _told(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
