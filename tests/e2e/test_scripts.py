"""`scripts/train.sh` as a user calls it, in a copy of the repository with a .venv that is ready."""

import json
import os
import shutil
import signal
import subprocess
import sysconfig
import venv

import psutil
import pytest

from tests.cluster.harness import wait_for
from tests.e2e.conftest import ROOT, TWO

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """What the script needs, and a .venv with the packages of this environment, marked as `prepare` marks it."""
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


def start(repository, *arguments):
    script = repository / "scripts" / "train.sh"
    env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTHONPATH")}
    pipe = subprocess.PIPE
    return subprocess.Popen([script, *arguments], cwd="/", env=env, stdout=pipe, stderr=pipe, text=True)


def train(repository, *arguments):
    process = start(repository, *arguments)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def test_it_trains_a_model(repository):
    code, out, err = train(repository, *TWO, "train.tokens=30000", "run.name=small")
    assert code == 0, err
    folder = repository / "runs" / "small"  # relative paths start at the root of the repository
    assert str(folder) in out
    assert "eval loss:" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert (folder / "model" / "model.safetensors").is_file()
    assert "Setting up" not in err


def test_help_names_every_group(repository):
    code, out, err = train(repository, "--help")
    assert (code, err) == (0, "")
    for group in ("run", "model", "data", "train", "diloco", "pools", "chaos", "tracking", "eval", "checkpoint"):
        assert group in out


def test_a_wrong_key_is_one_line_and_exit_code_2(repository):
    code, out, err = train(repository, "train.tokns=1")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "train.tokns" in line
    assert not (repository / "runs" / "main").exists()


def test_a_signal_to_the_script_reaches_the_run_and_its_exit_code_comes_back(repository):
    process = start(repository, *TWO, "train.tokens=1000000000", "run.name=stopped")
    tape = repository / "runs" / "stopped" / "events.jsonl"
    wait_for("a merge", lambda: tape.exists() and '"kind": "merge"' in tape.read_text(), 150.0)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 143, err
    assert json.loads(tape.with_name("summary.json").read_text())["status"] == "stopped"
    wait_for("no process is left", lambda: not any(child.is_running() for child in family))
