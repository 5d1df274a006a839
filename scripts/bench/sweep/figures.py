"""What finished runs say: losses, gaps to data parallel, and differences to the row that a row varies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sweep.results import Results, tuned
from sweep.rows import CORE_SEEDS, ROWS, Row

Figures = dict[str, Any]


def compared(losses: Mapping[int, float], others: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Mean of 100·(loss/other − 1) over the seeds that both have, and its standard error.

    None for what so few pairs can't give: the mean needs one, its error s/√n (s with n − 1) needs two.
    """
    differences = [100 * (losses[seed] / others[seed] - 1) for seed in sorted(losses.keys() & others.keys())]
    mean = statistics.mean(differences) if differences else None
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    return mean, error


def figures(results: Results, row: Row, seeds: int | None, tokens: int) -> Figures | None:
    """A row's figures from all seeds (or so many) that ran; None before any did."""
    lines = [line for job in results.jobs_of(row, seeds or CORE_SEEDS, tokens) if (line := results.of(job)) is not None]
    if not lines:
        return None
    losses = {line["settings"]["seed"]: line["loss"] for line in lines}
    gap, gap_error = compared(losses, results.losses(ROWS[row.baseline], tokens, seeds))
    others = results.losses(ROWS[row.like], tokens, seeds) if row.like else {}
    against, against_error = compared(losses, others)
    lr, tried = str(results.best_lr(row, tokens)), tuned(row).lrs

    def mean(key: str) -> float:
        return statistics.mean(line[key] for line in lines)

    speeds = [line["tokens"] / line["virtual_s"] for line in lines if "virtual_s" in line]
    return {
        "lr": lr,
        "lr_at_edge": lr in (tried[0], tried[-1]),
        "losses": losses,
        "gap_percent": gap,
        "gap_error": gap_error,
        "like": row.like,
        "against_percent": against,
        "against_error": against_error,
        "tokens": lines[0]["tokens"],
        "merges": lines[0]["merges"],
        "discarded_share": mean("discarded_share"),
        "contributors": mean("contributors"),
        "tokens_per_s": statistics.mean(speeds) if speeds else None,
    }


def table(found: Mapping[str, Figures]) -> str:
    """Markdown."""
    lines = [
        "| row | lr | tokens | eval loss | seeds | to data parallel | to the row it varies | merges | contributors "
        "| discarded | tokens/s | how |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        losses = list(row["losses"].values())
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        gap = "" if ROWS[name].data_parallel else _percent(row["gap_percent"], row["gap_error"])
        against = _percent(row["against_percent"], row["against_error"])
        varied = f"{against} {row['like']}" if against and row["like"] != ROWS[name].baseline else ""
        cells = [
            name,
            row["lr"] + ("*" if row["lr_at_edge"] else ""),
            f"{row['tokens'] / 1e6:.2f} M",
            f"{statistics.mean(losses):.4f}{spread}",
            str(len(losses)),
            gap,
            varied,
            str(row["merges"]),
            f"{row['contributors']:.2f}",
            f"{row['discarded_share']:.1%}",
            f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "",
            ROWS[name].note,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(mean: float | None, error: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:+.2f}%" + (f" ± {error:.2f}" if error is not None else "")


def plotted(found: Mapping[str, Figures]) -> Sequence[tuple[str, float, float]]:
    """(row, gap to data parallel in percent, its standard error or NaN) of all rows that have a gap, smallest first."""
    gaps = [
        (name, row["gap_percent"], math.nan if row["gap_error"] is None else row["gap_error"])
        for name, row in found.items()
        if row["gap_percent"] is not None and not ROWS[name].data_parallel
    ]
    return sorted(gaps, key=lambda gap: gap[1])
