"""Runs the scripts as a user does, in a copy of the repository with a .venv that is ready."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import psutil
import pytest

from below import below
from tests.cluster.harness import wait_for
from tests.ports import free_port
from tests.small import SMALL

ROOT = Path(__file__).parents[2]
TWO = [
    *SMALL,
    "train.warmup_tokens=1000",
    "eval.sample_tokens=8",
    "diloco.sync_interval=40",
    "diloco.overlap_steps=4",
    "learners=2",
]


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """What the scripts need, and a .venv with the packages of this environment, marked as `prepare` marks it."""
    copy = tmp_path_factory.mktemp("scripts") / "repository"
    for name in ("app", "actors", "conf", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    venv.create(copy / ".venv", with_pip=False, symlinks=True)
    base = {"base": str(copy / ".venv"), "platbase": str(copy / ".venv")}
    packages = f"{copy}\n{sysconfig.get_path('purelib')}\n"
    with open(os.path.join(sysconfig.get_path("purelib", "venv", base), "packages.pth"), "w") as file:
        file.write(packages)
    with (copy / "pyproject.toml").open("rb") as file:
        checksum = subprocess.run(["cksum"], stdin=file, capture_output=True, text=True, check=True).stdout
    (copy / ".venv" / ".installed").write_text(f"{copy} {checksum}")
    return copy


def clean_env() -> dict[str, str]:
    """The environment without what points to a cluster or to this checkout."""
    return {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTHONPATH")}


def events_in(folder: Path, kind: str) -> list[dict]:
    """Events of a run folder, which may be written at this moment."""
    path = folder / "events.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [event for event in found if event["kind"] == kind]


class Command:
    """`scripts/train.sh` in the background, called from somewhere else."""

    def __init__(self, repository: Path, folder: Path, *overrides: str, env: dict[str, str] | None = None):
        self.folder = folder
        folder.parent.mkdir(exist_ok=True)
        self.log = folder.parent / f"{folder.name}.{len(list(folder.parent.glob('*.log')))}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [repository / "scripts" / "train.sh", *TWO, f"run.dir={folder}", *overrides],
                cwd="/",
                env={**clean_env(), **(env or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self, seconds: float = 150.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None

    @property
    def output(self) -> str:
        return self.log.read_text()

    def events(self, kind: str) -> list[dict]:
        return events_in(self.folder, kind)

    def wait_merges(self, count: int) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.output
            return len(self.events("merge")) >= count

        wait_for(f"{count} merges", look, 150.0)

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def family(self) -> list[psutil.Process]:
        return below(self.process.pid)

    def end(self) -> None:
        if self.process.poll() is None:
            family = self.family()
            self.process.kill()
            self.process.wait()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture
def command(repository, tmp_path):
    started: list[Command] = []

    def start(*overrides: str, folder: Path | None = None, env: dict[str, str] | None = None) -> Command:
        started.append(Command(repository, folder or tmp_path / "run", *overrides, env=env))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture(scope="session")
def leaving():
    """Processes of killed drivers that must be gone when all tests are done.

    Ray's own agents take about a minute to notice that their cluster is gone.
    """
    processes: list[psutil.Process] = []
    yield processes
    wait_for("what killed drivers left is gone", lambda: not any(process.is_running() for process in processes), 150.0)


@pytest.fixture(scope="session")
def completed(repository, tmp_path_factory):
    """A run that has ended with a model; to look at, not to change."""
    folder = tmp_path_factory.mktemp("completed") / "run"
    run = Command(repository, folder, "train.tokens=60000", "tracking=wandb", f"run.dir={folder.as_uri()}")
    try:
        assert run.wait() == 0, run.output
        yield run
    finally:
        run.end()


@contextlib.contextmanager
def started_head(ports: list[int], *args: str, python: str = sys.executable, env: dict[str, str] | None = None):
    """A cluster that was started apart, by `ray start` on the first of these ports; gives its process."""
    folder = Path(f"/tmp/dl{ports[0]}")  # socket paths must be short
    folder.mkdir()
    options = ["--head", f"--port={ports[0]}", "--num-cpus=4", f"--temp-dir={folder}/ray", *args]
    with (folder / "head.log").open("w") as log:
        start = [python, "-m", "ray.scripts.scripts", "start", "--block", *options]
        head = subprocess.Popen(start, stdout=log, stderr=subprocess.STDOUT, env=env)
    try:
        wait_for("the head is up", lambda: "started" in (folder / "head.log").read_text())
        yield head
    finally:
        family = below(head.pid)
        head.terminate()
        head.wait(60)
        wait_for("the head is gone", lambda: not any(process.is_running() for process in family))
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ray_head():
    """The address of a cluster that was started apart, without a dashboard."""
    port = free_port()
    with started_head([port], "--include-dashboard=false"):
        yield f"127.0.0.1:{port}"
