"""A learner that is frozen for 20 s: shorter than its hang deadline it goes on, longer than that it is replaced.

Whatever it kept from before the freeze is merged at most once, and only onto the value that it was made from.
"""

import contextlib
import os
import signal
import time

import psutil
import pytest

from actors.spec import SYNCER
from tests.cluster.audit import assert_no_work_counts_twice, merged_tokens
from tests.cluster.harness import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

FROZEN_S = 20.0
STUTTERS = 12


def freeze(run):
    """Stop learner-1; returns its last status, when it stood still, and its tokens as the syncer counts them then."""
    frozen = run.learner("learner-1")
    os.kill(frozen.pid, signal.SIGSTOP)
    wait_for("it stands still", lambda: psutil.Process(frozen.pid).status() == psutil.STATUS_STOPPED)
    stopped = time.time()
    run.wait_merges(4)  # what was on its way when it stopped has arrived
    return frozen, stopped, run.syncer().totals["learner-1"][1]


@contextlib.contextmanager
def held_still(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stutter(run, pid):
    """Short freezes of learner-1, each a moment after it answered: what it says when it thaws is about the past.

    With learner-0 stopped as well, rounds that hold its answer stay open for their grace window.
    """
    before = len(refused(run))
    other = run.learner("learner-0").pid
    for _ in range(STUTTERS):
        with contextlib.ExitStack() as frozen:
            with held_still(other):
                run.wait_merges(1)
                frozen.enter_context(held_still(pid))
            run.wait_merges(2)
        run.wait_merges(1)
    assert len(refused(run)) > before


def refused(run):
    return [event["reason"] for event in run.events("refused") if event["learner"] == "learner-1"]


def watch_merges_go_on(run, until):
    """Merges go on, without learner-1, all the time."""
    while time.time() < until:
        run.wait_merges(2)


def test_frozen_for_less_than_its_deadline_the_same_process_goes_on_and_is_merged_again(start):
    run = start("diloco.hang_min_s=60", "diloco.overlap_steps=45")
    run.wait_training()
    frozen, stopped, tokens = freeze(run)
    try:
        silent_since = time.time()
        watch_merges_go_on(run, stopped + FROZEN_S)
        assert not run.merged_since(silent_since, "learner-1", frozen.incarnation)
        assert run.syncer().totals["learner-1"][1] == tokens
    finally:
        thawed = time.time()
        os.kill(frozen.pid, signal.SIGCONT)
    wait_for(
        "several merges hold its work again",
        lambda: len(run.merged_since(thawed, "learner-1", frozen.incarnation)) > 3,
    )
    stutter(run, frozen.pid)
    back = run.learner("learner-1")
    assert (back.pid, back.incarnation) == (frozen.pid, frozen.incarnation)
    assert back.steps > frozen.steps
    assert not run.events("leave")
    check(run, {"learner-1": {frozen.incarnation: None}, "learner-0": {1: None}})


def test_frozen_for_longer_than_its_deadline_it_is_replaced_and_its_past_is_over(start):
    run = start()
    run.wait_training()
    frozen, stopped, tokens = freeze(run)
    watch_merges_go_on(run, stopped + FROZEN_S)
    back = wait_for(
        "learner-1 is replaced", lambda: (s := run.status("learner-1")) and s.incarnation > frozen.incarnation and s
    )
    assert back.pid != frozen.pid
    wait_for("the frozen process is gone", lambda: not psutil.pid_exists(frozen.pid))
    wait_for(
        "several merges hold the new one's work",
        lambda: len(run.merged_since(stopped, "learner-1", back.incarnation)) > 3,
    )
    (left,) = run.events("leave")
    assert (left["learner"], left["incarnation"], left["reason"]) == ("learner-1", frozen.incarnation, "hang")
    assert not run.merged_since(left["at"], "learner-1", frozen.incarnation)
    assert run.learner("learner-0").incarnation == 1
    check(run, {"learner-1": {frozen.incarnation: tokens, back.incarnation: None}, "learner-0": {1: None}})


def check(run, incarnations):
    """From the tape: no work counts twice, nor more of it than there was. None stands for the rest of the tokens."""
    merges = run.events("merge")
    totals = run.syncer().totals
    assert_no_work_counts_twice(merges)
    for learner, tokens in incarnations.items():
        known = sum(count for count in tokens.values() if count is not None)
        for incarnation, count in tokens.items():
            merged = merged_tokens(merges, learner, incarnation)
            assert 0 < merged <= (totals[learner][1] - known if count is None else count)
    status = run.status(SYNCER)
    assert status is not None
    assert status.work_exact
    work = run.finish()["work"]
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
