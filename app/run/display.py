"""The terminal while a run goes on: a live table where there is a terminal, else a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:  # rich is imported where a table is drawn: plain output needs none of it
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table

_STATE_STYLE = {"training": "green", "finished": "green", "silent": "red", "failed": "red"}


@dataclass(frozen=True)
class LearnerRow:
    """One line of the table."""

    learner: str
    pool: str
    state: str
    """One word: starting, joining, training, finished, failed or silent."""
    step: int
    tokens_per_s: float
    loss: float | None
    last_merge_s: float | None
    """Seconds since work of this learner was last merged; None before."""
    incarnation: int


@dataclass(frozen=True)
class RunView:
    """What the terminal shows. Pure values: drawing it changes nothing."""

    rows: tuple[LearnerRow, ...]
    tokens: int
    """Processed by all learners."""
    budget: int
    tokens_per_s: float
    """Of all learners together; 0 while it is not known."""
    elapsed_s: float
    merges: int
    live: int
    quorum: int
    """K: fewest learners in a merge."""
    eval_loss: float | None
    """Nats per token, newest."""
    syncer: str
    """The syncer's state, one word or a few."""

    @property
    def share(self) -> float:
        """Part of the token budget that is done, 0 to 1."""
        return min(1.0, self.tokens / self.budget)

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the present speed; None while it is not known."""
        left = max(0, self.budget - self.tokens)
        return left / self.tokens_per_s if self.tokens_per_s > 0 else None


class Display:
    """Shows views on a stream; use as a context manager."""

    def __init__(self, stream: TextIO, plain_every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`plain_every_s`: seconds between two lines where `stream` is not a terminal."""
        self._stream = stream
        self._every = plain_every_s
        self._clock = clock
        self._last: float | None = None
        self._full = False
        """The line of the reached budget is printed."""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: RunView) -> None:
        """Draw the view, or print its line when it is time for one."""
        if self._live is not None:
            self._live.update(live_view(view), refresh=True)
            return
        now = self._clock()
        full = view.share >= 1.0 and not self._full
        if self._last is None or now - self._last >= self._every or full:
            self._full = view.share >= 1.0
            self._last = now
            self.say(plain_line(view))

    def say(self, line: str) -> None:
        """A line of its own, above the table."""
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self._stream, flush=True)


def plain_line(view: RunView) -> str:
    """The view as one line of plain text."""
    learners = " ".join(f"{row.learner}:{row.state}@{row.step}" for row in view.rows)
    return (
        f"[{duration(view.elapsed_s)}] {view.share:4.0%} of {view.budget:,} tokens, {_eta(view)} left | "
        f"{view.tokens_per_s:,.0f} tokens/s | merges {view.merges} | live {view.live}, quorum {view.quorum} | "
        f"eval loss {_number(view.eval_loss)} | syncer {view.syncer} | {learners}"
    )


def live_view(view: RunView) -> Group:
    """The view as a rich table with a progress bar under it."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=view.share, width=28),
        Text(f"{view.share:.0%}  {view.tokens:,} of {view.budget:,} tokens  {_eta(view)} left"),
    )
    facts = Text(
        f"merges {view.merges}  live {view.live}  quorum {view.quorum}  eval loss {_number(view.eval_loss)}  "
        f"syncer {view.syncer}  {view.tokens_per_s:,.0f} tokens/s  {duration(view.elapsed_s)}"
    )
    return Group(_table(view), bar, facts)


def _table(view: RunView) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fits 80 columns
    for name in ("learner", "pool", "state"):
        table.add_column(name)
    for name in ("step", "tokens/s", "loss", "last merge", "incarnation"):
        table.add_column(name, justify="right")
    for row in view.rows:
        table.add_row(
            row.learner,
            row.pool,
            Text(row.state, style=_STATE_STYLE.get(row.state, "")),
            str(row.step),
            f"{row.tokens_per_s:,.0f}",
            _number(row.loss),
            "-" if row.last_merge_s is None else f"{row.last_merge_s:.1f} s ago",
            str(row.incarnation),
        )
    return table


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _eta(view: RunView) -> str:
    return "?" if view.eta_s is None else duration(view.eta_s)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
