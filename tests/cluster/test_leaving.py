"""A learner that gets SIGTERM hands in its work before its process ends; a freeze or a kill half-way harms nothing."""

import os
import signal

import psutil
import pytest

from below import gone
from tests.cluster.audit import assert_every_sample_has_one_place, assert_no_work_counts_twice
from tests.cluster.harness import kill, wait_for


def left(run, learner, incarnation):
    return [e["reason"] for e in run.events("leave") if (e["learner"], e["incarnation"]) == (learner, incarnation)]


def finished(run):
    assert run.syncer().work_exact
    assert_no_work_counts_twice(run.events("merge"))
    summary = run.finish()
    assert_every_sample_has_one_place(run, summary)
    work = summary["work"]
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    return summary


def test_sigterm_loses_nothing_and_the_learner_comes_back(start):
    run = start()
    run.wait_training()
    status = run.learner("learner-1")
    process = psutil.Process(status.pid)
    os.kill(status.pid, signal.SIGTERM)
    assert wait_for("it has left", lambda: left(run, "learner-1", status.incarnation)) == ["left"]
    wait_for("its process is gone", lambda: gone(process))
    back = wait_for("it is back", lambda: (s := run.status("learner-1")) and s.incarnation > status.incarnation and s)
    wait_for("its work is merged", lambda: run.merged_since(0, "learner-1", back.incarnation))
    assert run.learner("learner-0").incarnation == 1
    summary = finished(run)
    assert "died" not in summary["work"]["discarded"]
    assert summary["samples"]["reissued"] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_end_in_the_middle_of_it_is_a_death_like_any_other(start, number):
    """Nobody merges while the syncer is stopped, so that the hand-in is under way."""
    run = start("elastic.hand_in_s=60")
    run.wait_training()
    status = run.learner("learner-1")
    syncer = run.syncer()
    os.kill(syncer.pid, signal.SIGSTOP)
    try:
        os.kill(status.pid, signal.SIGTERM)
        wait_for("it hands in", lambda: (s := run.status("learner-1")) and s.state == "leaving")
        assert run.learner("learner-1").steps >= status.steps
        if number is signal.SIGKILL:
            kill(status.pid)
        else:
            os.kill(status.pid, number)
    finally:
        os.kill(syncer.pid, signal.SIGCONT)
    back = wait_for("it is back", lambda: (s := run.status("learner-1")) and s.incarnation > status.incarnation and s)
    wait_for("its work is merged", lambda: run.merged_since(0, "learner-1", back.incarnation))
    finished(run)
