"""The runs of a storm: the command line as a user has it, in a process of its own, watched from outside."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config import load
from app.run import tape
from app.run.folder import TAPE
from below import marked

ROOT = Path(__file__).resolve().parents[3]
KINDS = dict(load(["chaos=storm"]).chaos.rates.items())
"""Kind → its weight in the mix."""
SITE = "dark"
"""The pool that goes dark at once."""
MARK = "DILOCO_STORM"
"""Environment variable of everything that a run starts."""
RIVAL = ("algo=data_parallel", "train.elastic=true")
"""Synchronous training whose group forms again after every failure, with whoever is left."""
LEAVE_S = 20.0
"""After so long nothing of a run may be left."""
BARE_STARTS = 3
BARE_START = (
    "from app.config import load; from app.learning.model import build_model; c = load([]); "
    "build_model(c.model, 257, c.data.seq_len, 1)"
)
"""What a process costs that imports torch and transformers and builds the model."""
MEASURE_S = 20.0


@dataclass(frozen=True)
class Storm:
    """What is asked for."""

    learners: int
    seconds: int
    kinds: tuple[str, ...]
    rate: int
    """Faults an hour."""
    seed: int
    dark_s: int | None = None
    """Instead of all that: half of the learners die at once, and can't come back for so many seconds."""

    @property
    def overrides(self) -> list[str]:
        """What the command line takes, faults included."""
        if self.dark_s is not None:
            fault = f"{{kind: kill_site, target: {SITE}, at_s: {self.seconds // 3}, seconds: {self.dark_s}}}"
            return [f"+pools.{SITE}.learners={self.learners // 2}", f"chaos.faults=[{fault}]"]
        total = sum(KINDS[kind] for kind in self.kinds)
        rates = [f"chaos.rates.{kind}={self.rate * KINDS[kind] / total:.3f}" for kind in self.kinds]
        return [*rates, f"chaos.seed={self.seed}"]


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    folder: Path
    code: int
    left_behind: int
    """Processes that were there a while later."""
    bare_starts_s: tuple[float, ...]
    """How long bare starts took, under the same load: there are as many in a calm run, as they cost something."""


def train(storm: Storm, folder: Path, tokens: int, faults: bool, overrides: Sequence[str] = ()) -> Finished:
    """One run to its budget."""
    mark = uuid.uuid4().hex
    more = [f"train.tokens={tokens}", *(storm.overrides if faults else []), *overrides]
    process = _start(storm, folder, more, mark)
    began = time.monotonic()
    bare: list[float] = []
    while process.poll() is None:
        if len(bare) < BARE_STARTS and time.monotonic() - began > storm.seconds * (len(bare) + 1) / (BARE_STARTS + 1):
            bare.append(bare_start())
        time.sleep(1.0)
    deadline = time.monotonic() + LEAVE_S
    while (left := marked(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for each in left:
        each.kill()
    return Finished(folder, process.returncode, len(left), tuple(bare))


def tokens_per_s(storm: Storm, folder: Path, most_s: float) -> float:
    """How fast the machine trains when all learners do: a run that is stopped once it was measured."""
    process = _start(storm, folder, ["train.tokens=1000000000", "eval.every_tokens=1000000000"], uuid.uuid4().hex)
    path, deadline = folder / TAPE, time.monotonic() + most_s + MEASURE_S
    first: dict[str, float] = {}
    try:
        while process.poll() is None:
            events = tape.read(path)[0]
            joined = {event["learner"] for event in events if event["kind"] == "first_merge"}
            merges = [event for event in events if event["kind"] == "merge"]
            if merges and (len(joined) == storm.learners or time.monotonic() > deadline - MEASURE_S):
                first = first or merges[-1]
                if merges[-1]["at"] - first["at"] > MEASURE_S:
                    return (merges[-1]["tokens"] - first["tokens"]) / (merges[-1]["at"] - first["at"])
            time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    raise RuntimeError(f"the run has ended before it was measured: {folder}.log")


def _start(storm: Storm, folder: Path, overrides: list[str], mark: str) -> subprocess.Popen[bytes]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "app.train", f"learners={storm.learners}", f"run.dir={folder}", *overrides]
    with folder.with_suffix(".log").open("w") as log:
        environment = {**os.environ, MARK: mark}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def bare_start() -> float:
    """Seconds that a process takes which imports torch and transformers and builds the model."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", BARE_START], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def median(values: list[float]) -> float | None:
    """None of nothing."""
    return statistics.median(values) if values else None
