"""The report: the table between two markers of a page whose prose is written by hand, and the picture beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sweep.figures import Figures, plotted, table
from sweep.rows import ROWS

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
COLOURS = {"adamw": "#3b6ea8", "muon": "#c8553d"}


def write_table(page: Path, found: Mapping[str, Figures], heading: str) -> None:
    """Replace what stands between the markers of the page; without markers or page they are put at its end."""
    text = page.read_text() if page.exists() else "# Quality at equal tokens\n"
    if BEGIN not in text or END not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before}{BEGIN}\n{heading}\n\n{table(found)}\n{END}{after}")


def draw(picture: Path, found: Mapping[str, Figures], title: str) -> None:
    """One bar a row: its gap to data parallel with the same inner optimizer, with error bars where seeds allow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    gaps = plotted(found)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.24 * max(1, len(gaps))), layout="constrained")
    names = [name for name, _, _ in gaps]
    colours = [COLOURS[ROWS[name].optimizer] for name in names]
    errors = [error for _, _, error in gaps]
    axes.barh(names, [gap for _, gap, _ in gaps], xerr=errors, color=colours, height=0.7, ecolor="#333333", capsize=2)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("eval loss against data parallel with the same inner optimizer, %")
    axes.set_title(title, fontsize=10)
    used = [optimizer for optimizer in COLOURS if any(ROWS[name].optimizer == optimizer for name in names)]
    axes.legend(handles=[Patch(color=COLOURS[o], label=o) for o in used], loc="upper right", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)
