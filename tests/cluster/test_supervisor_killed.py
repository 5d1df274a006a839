"""The supervisor is killed at the moments when it holds a run's fate: starting, ending, lingering."""

import json

import psutil
import pytest

from actors.spec import SUPERVISOR
from tests.cluster.audit import processes, remains
from tests.cluster.harness import kill, wait_for

pytestmark = pytest.mark.timeout(300)


def kill_supervisor(run):
    """A real SIGKILL; another process of the same supervisor is seen to answer."""
    pid = wait_for("the supervisor answers", lambda: run.try_call(SUPERVISOR, "pid"))
    kill(pid)
    return lambda: wait_for("it is back", lambda: (new := run.try_call(SUPERVISOR, "pid")) and new != pid)


def wait_phase(run, wanted):
    """The supervisor's status once it is in this phase; it must not be past it."""
    order = ("starting", "running", "ending", "done")

    def look():
        status = run.status(SUPERVISOR)
        assert status is None or order.index(status.phase) <= order.index(wanted), "too late to test this"
        return status if status is not None and status.phase == wanted else None

    return wait_for(f"the run is {wanted}", look)


def summary_file(run):
    path = run.spec.work_dir / "summary.json"
    return path.read_bytes(), path.stat().st_mtime_ns


def check_completed(run, summary):
    assert summary["status"] == "completed"
    assert summary == json.loads(summary_file(run)[0])
    assert summary["tokens_processed"] >= run.config.train.tokens
    assert summary["eval_loss_final"] is not None
    work = summary["work"]
    assert work["outstanding"] == 0
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    assert {event["incarnation"] for event in run.events("join")} == {1}  # no learner was started twice
    assert len({event["at"] for event in run.events("run_ended")}) == 1
    assert (run.spec.work_dir / "model" / "model.safetensors").is_file()
    wait_for("nothing is left in the cluster", lambda: not remains(run.spec))


@pytest.mark.slow
def test_killed_while_it_starts_the_run_is_started_once_and_completes(start):
    run = start("train.tokens=6000")
    wait_for("a learner's process starts", lambda: processes("Learner"))
    is_back = kill_supervisor(run)
    assert not run.events("join"), "too late to test this"
    is_back()
    check_completed(run, run.wait_done())
    assert len(run.events("syncer_started")) == 1


def test_killed_while_it_ends_the_run_is_evaluated_exported_and_concluded(start):
    run = start("train.tokens=6000")  # reached before the evaluator's process is up: the end takes a while
    wait_phase(run, "ending")
    is_back = kill_supervisor(run)
    assert not (run.spec.work_dir / "summary.json").exists(), "too late to test this"
    pid = is_back()
    assert psutil.pid_exists(pid)
    check_completed(run, run.wait_done())


@pytest.mark.slow
def test_killed_while_it_lingers_the_run_is_over_and_stays_so(start):
    run = start("train.tokens=6000", "supervisor.linger_s=60")
    first = wait_phase(run, "done")
    before = summary_file(run)
    kill_supervisor(run)()
    again = wait_phase(run, "done")
    assert again.summary == first.summary
    assert processes() == processes("Supervisor") != []  # it started nothing anew
    assert len(run.events("syncer_started")) == 1
    check_completed(run, run.wait_done())
    assert summary_file(run) == before
