"""What people see, from plain values."""

import dataclasses
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest
from rich.cells import cell_len
from rich.console import Console

from app.run.display import Display, LearnerRow, RunView, duration, live_view, plain_line
from app.run.final_report import Ending, Recovery, final_report, recovery_line

VIEW = RunView(
    rows=(
        LearnerRow("learner-0", "local", "training", 120, 4321.0, 3.25, 1.5, 1),
        LearnerRow("learner-1", "local", "starting", 0, 0.0, None, None, 2),
    ),
    tokens=1_000_000,
    budget=4_000_000,
    tokens_per_s=20_000.0,
    elapsed_s=61.0,
    merges=42,
    live=1,
    quorum=1,
    eval_loss=2.5,
    syncer="up",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_plain_line_says_it_all() -> None:
    line = plain_line(VIEW)
    assert "\n" not in line
    for part in (
        "[1:01]",
        "25% of 4,000,000",
        "2:30 left",
        "merges 42",
        "quorum 1",
        "eval loss 2.500",
        "syncer up",
    ):
        assert part in line
    assert "learner-0:training@120 learner-1:starting@0" in line


def test_unknown_values_are_shown_as_such() -> None:
    view = dataclasses.replace(VIEW, tokens_per_s=0.0, eval_loss=None)
    assert "? left" in plain_line(view)
    assert "eval loss -" in plain_line(view)


def test_the_end_is_never_overshot() -> None:
    view = dataclasses.replace(VIEW, tokens=4_000_500)
    assert view.share == 1.0
    assert view.eta_s == 0.0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.9, "0:59"), (754.0, "12:34"), (3723.0, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_table_has_a_row_for_each_learner() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(live_view(VIEW))
    text = console.export_text()
    for part in ("incarnation", "last merge", "4,321", "3.250", "1.5 s ago", "25%", "2:30 left", "quorum 1"):
        assert part in text
    rows = [line for line in text.splitlines() if "learner-" in line]
    assert len(rows) == 2
    assert len({line.index("local") for line in rows}) == 1
    assert rows[1].split()[-1] == "2"


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    stream, times = io.StringIO(), iter([0.0, 1.0, 4.9, 5.0, 6.0, 6.1, 6.2, 6.3])
    with Display(stream, 5.0, lambda: next(times)) as display:
        for _ in range(5):
            display.show(VIEW)
        for _ in range(3):  # the reached budget is told at once, and once
            display.show(dataclasses.replace(VIEW, tokens=VIEW.budget))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "100%" in lines[-1]


def test_a_terminal_gets_the_table() -> None:
    stream = Terminal()
    with Display(stream, 5.0) as display:
        display.show(VIEW)
        display.say("learner-1 was killed [kill]")
    assert "learner-0" in stream.getvalue()
    assert "learner-1 was killed [kill]" in stream.getvalue()


SHOW = """
import dataclasses, sys
from app.run.display import Display
from tests.unit.test_display import VIEW
with Display(sys.stdout, 5.0) as display:
    for line in sys.stdin:
        display.say(f"say {line.strip()}")
        display.show(dataclasses.replace(VIEW, merges=int(line)))
"""


def test_the_table_lives_on_a_real_terminal_that_changes_its_size() -> None:
    """Drawn in place: each frame fits the width that the terminal has then."""
    master, slave = pty.openpty()
    size(slave, 80)
    env = {**os.environ, "TERM": "xterm-256color"} | {"COLUMNS": "", "LINES": ""}
    child = subprocess.Popen([sys.executable, "-c", SHOW], stdin=subprocess.PIPE, stdout=slave, env=env)
    frames = []
    for merges, columns in ((101, 80), (102, 40), (103, 120), (104, 80)):
        size(slave, columns)
        assert child.stdin is not None
        child.stdin.write(f"{merges}\n".encode())
        child.stdin.flush()
        frames.append((read_until(master, f"merges {merges}", "tokens/s  1:01" if columns >= 80 else ""), columns))
    child.stdin.close()
    assert child.wait(30) == 0
    os.close(slave)
    os.close(master)
    for text, columns in frames:
        lines = re.split(r"[\r\n]+", ESCAPES.sub("", text))
        assert [line for line in lines if cell_len(line) > columns] == []
        assert any(line.startswith("say 10") for line in lines)
        if columns >= 80:  # the words are whole; drawn once by `say` and once by `show`
            assert sum(line.strip().startswith("learner-1 ") for line in lines) in (1, 2)
    assert frames[1][0].count("\x1b[1A") >= 5  # goes up over the frame before


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def size(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def read_until(master: int, *parts: str) -> str:
    """What the terminal gets, up to the end of the frame that has these parts."""
    text = ""
    while not all(part in ESCAPES.sub("", text) for part in parts):
        assert select.select([master], [], [], 30.0)[0], text
        text += os.read(master, 65536).decode()
    while select.select([master], [], [], 0.2)[0]:
        text += os.read(master, 65536).decode()
    return text


def test_the_final_report() -> None:
    phases = {"detect": 0.4, "start": 0.9, "import": 2.0, "build": 0.3, "join": 0.1, "first merge": 1.2}
    ending = Ending(
        status="completed",
        tokens=4_000_000,
        wall_s=200.0,
        merges=300,
        eval_loss_first=6.95,
        eval_loss_final=3.1,
        bits_per_byte=1.79,
        gzip_bits_per_byte=1.82,
        recoveries=(Recovery("kill", "learner-1", phases, 4.9), Recovery("freeze", "learner-2", {}, None)),
        sample="def main():\n    pass",
        folder="/tmp/run",
    )
    text = final_report(ending)
    for part in (
        "completed: 4,000,000 tokens in 3:20 (20,000 tokens/s), 300 merges",
        "eval loss: 6.950 -> 3.100",
        "1.790 bits per byte (gzip -9 on the same bytes: 1.820)",
        "recovered: learner-1 (kill) in 4.9 s: detect 0.4, start 0.9, import 2.0, build 0.3, join 0.1, first merge 1.2",
        "not recovered: learner-2 (freeze)",
        "  | def main():\n  |     pass",
        "from_pretrained('/tmp/run/model')",
    ):
        assert part in text
    stopped = final_report(dataclasses.replace(ending, status="stopped", bits_per_byte=None, sample=None))
    assert "from_pretrained" not in stopped
    assert "bits per byte" not in stopped


def test_a_recovery_with_few_known_phases() -> None:
    assert recovery_line(Recovery("kill_syncer", "syncer", {"join": 1.0}, 2.0)) == (
        "recovered: syncer (kill_syncer) in 2.0 s: join 1.0"
    )
