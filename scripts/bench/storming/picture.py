"""The storm as a picture: learners as rows over time, coloured by what they do; loss and contributors above."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storming.figures import Run

TRAINING, AWAY = "#4c956c", "#d9d9d9"
FAULTS = {
    "kill": "#c8553d",
    "kill_worker": "#c8553d",
    "preempt": "#a63c8f",
    "freeze": "#3b6ea8",
    "slow": "#e0a030",
    "mute": "#6b4fa0",
    "corrupt": "#222222",
}
"""Colour of a fault's mark on its learner's row."""


def draw(picture: Path, rough: Run, calm: Run) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    history = rough.history
    start = history.first_step_at() or history.started_at
    figure, (top, middle, rows) = pyplot.subplots(
        3, 1, figsize=(11, 7), sharex=True, layout="constrained", gridspec_kw={"height_ratios": [2, 1.4, 3]}
    )
    for run, colour, name in ((calm, "#888888", "calm"), (rough, "#c8553d", "storm")):
        begun = run.history.first_step_at() or run.history.started_at
        evals = run.history.of("eval")
        top.plot([e["at"] - begun for e in evals], [e["loss"] for e in evals], color=colour, label=name, marker=".")
    top.set_ylabel("eval loss, nats")
    top.legend(fontsize=8)
    merges = history.of("merge")
    times = [merge["at"] - start for merge in merges]
    middle.plot(times, [len(merge["contains"]) for merge in merges], ".", markersize=2, color="#3b6ea8", label="in it")
    middle.plot(times, [merge["live"] for merge in merges], color="#888888", linewidth=0.8, label="live")
    middle.set_ylabel("learners a merge")
    middle.legend(fontsize=8, loc="lower left")
    _rows(rows, rough, start)
    rows.set_xlabel("seconds after the first step; bars: training, dots: faults, dashed: of a service")
    for axes in (top, middle, rows):
        axes.grid(axis="x", color="#eeeeee")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _rows(axes: Any, rough: Run, start: float) -> None:
    from matplotlib.patches import Patch

    learners = rough.history.learners()
    end = rough.history.budget_at() or rough.history.ended_at
    for row, learner in enumerate(learners):
        axes.broken_barh([(0.0, end - start)], (row - 0.35, 0.7), color=AWAY)
        facts = rough.history.learner(learner, (0, 0))
        axes.broken_barh([(low - start, high - low) for low, high in facts.stepping], (row - 0.35, 0.7), color=TRAINING)
    kinds = set()
    for fault in rough.history.of("fault"):
        at = fault["struck_at"] - start
        if fault["target"] in learners:
            kinds.add(fault["fault"])
            colour = FAULTS.get(fault["fault"], "#000000")
            axes.plot([at], [learners.index(fault["target"])], "o", color=colour, markersize=6, markeredgecolor="white")
        else:
            axes.axvline(at, color="#555555", linewidth=0.8, linestyle="--")
            axes.text(at, len(learners) - 0.4, fault["fault"], rotation=40, fontsize=6, va="bottom")
    marks = [_dot(kind) for kind in sorted(kinds)]
    bars = [Patch(color=TRAINING, label="training"), Patch(color=AWAY, label="not")]
    axes.legend(handles=[*bars, *marks], fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_yticks(range(len(learners)), learners, fontsize=8)
    axes.set_ylim(-0.6, len(learners) + 0.9)


def _dot(kind: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker="o", linestyle="", color=FAULTS.get(kind, "#000000"), label=kind)
