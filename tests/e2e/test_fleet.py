"""The example of a mixed fleet: nodes with labels, and pools that differ in all that a pool can say."""

import os
import signal
import subprocess

import psutil
import pytest

from app.diloco.merge import token_weight
from below import below
from tests.cluster.harness import wait_for
from tests.e2e.conftest import TWO, clean_env, events_in

pytestmark = pytest.mark.timeout(400)

SEQ_LEN = 32
SAMPLES = {"pair": 2 * 4, "old": 2 * 2, "spot": 4}
"""A step of a learner: workers × forward passes × samples in one."""
LEARNERS = {"learner-0": "pair", "learner-1": "old", "spot-0": "spot"}


def heed_ctrl_c():
    """As in a terminal: what a shell starts in the background ignores it, and a script can't undo that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def fleet(repository, tmp_path):
    started: list[subprocess.Popen] = []

    def start(*overrides):
        with (tmp_path / "log").open("w") as out:
            command = [repository / "scripts" / "fleet.sh", *TWO, f"run.dir={tmp_path / 'run'}", *overrides]
            options = {"cwd": "/", "env": clean_env(), "stderr": subprocess.STDOUT, "preexec_fn": heed_ctrl_c}
            started.append(subprocess.Popen(command, stdout=out, **options))
        return started[-1]

    yield start
    for process in started:
        for each in [*below(process.pid), process] if process.poll() is None else []:
            os.kill(each.pid, signal.SIGKILL)


@pytest.mark.slow
def test_pools_of_all_kinds_train_one_model_and_nothing_is_left(fleet, tmp_path):
    run, folder = fleet("learners=2", "train.tokens=100000000"), tmp_path / "run"

    def merged(learner):
        merges = events_in(folder, "merge")
        return [part for merge in merges for part in merge["contains"] if part["learner"] == learner]

    def alive_and_merged(learner):
        assert run.poll() is None, (tmp_path / "log").read_text()
        return merged(learner)

    for learner in LEARNERS:
        wait_for(f"work of {learner} is merged", lambda name=learner: alive_and_merged(name), 240.0)
    family: list[psutil.Process] = below(run.pid)
    run.send_signal(signal.SIGINT)
    assert run.wait(120) == 130, (tmp_path / "log").read_text()
    assert {e["learner"]: e["pool"] for e in events_in(folder, "join")} == LEARNERS
    for learner, pool in LEARNERS.items():
        for part in merged(learner):
            assert part["c_tokens"] == part["c_steps"] * SAMPLES[pool] * SEQ_LEN
            assert part["weight"] == token_weight(part["c_tokens"], part["c_steps"])
    wait_for("no process is left", lambda: not any(process.is_running() for process in family))
