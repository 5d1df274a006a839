"""The evaluator freezes: the run goes on, and its end comes."""

import os
import signal

import pytest

from actors.spec import EVALUATOR, SUPERVISOR
from actors.start import find_supervisor, status_of
from tests.cluster.harness import LiveRun, wait_for

pytestmark = pytest.mark.timeout(240)

SLOW_TO_MEASURE = ["train.tokens=30000", "data.heldout_share=0.6", "eval.batch_size=1", "learners=2"]


@pytest.fixture
def start(cluster, tmp_path):
    runs = []

    def start(*overrides: str) -> LiveRun:
        runs.append(LiveRun(tmp_path / "run", [*SLOW_TO_MEASURE, *overrides]))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def freeze_in_the_end(run: LiveRun) -> int:
    """The evaluator's process, stopped in the final evaluation."""

    def ending() -> bool:
        status = status_of(find_supervisor(run.spec.run_id), 5.0)
        assert status is None or status.phase != "done", "it ended too soon to be frozen"
        return status is not None and status.phase == "ending"

    wait_for("the run ends", ending)
    pid = wait_for("the evaluator answers", lambda: run.try_call(EVALUATOR, "pid"))
    wait_for("the supervisor hears it", lambda: (s := run.status(SUPERVISOR)) and EVALUATOR not in s.silent)
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.slow
def test_a_frozen_evaluator_holds_up_neither_a_stop_nor_the_end(start):
    run = start("supervisor.evaluator_silent_s=10000")
    freeze_in_the_end(run)
    summary = run.finish()
    assert summary["status"] == "stopped"
    assert summary["tokens_processed"] >= 30000
    run.close()

    # Nothing is left to train: measure, and write the model.
    run = start("run.resume=auto", "supervisor.evaluator_silent_s=10")
    frozen = freeze_in_the_end(run)
    wait_for("another evaluator", lambda: (pid := run.try_call(EVALUATOR, "pid")) and pid != frozen)
    summary = run.wait_done()
    assert summary["status"] == "completed"
    assert summary["eval_loss_final"] < summary["eval_loss_first"]
    assert (run.spec.work_dir / "model" / "config.json").is_file()


@pytest.mark.slow
def test_an_evaluator_that_freezes_in_the_run_is_replaced_and_measures_on(start):
    run = start(
        "train.tokens=1000000000",
        "data.heldout_share=0.2",
        "eval.every_tokens=2000",
        "supervisor.evaluator_silent_s=10",
    )
    wait_for("a first measurement", lambda: run.events("eval"))
    pid = run.call(EVALUATOR, "pid")
    os.kill(pid, signal.SIGSTOP)
    known = len(run.events("eval"))
    wait_for("another evaluator", lambda: (new := run.try_call(EVALUATOR, "pid")) and new != pid)
    wait_for("it measures", lambda: len(run.events("eval")) > known + 1)  # one may have been under way
    assert run.finish()["status"] == "stopped"
