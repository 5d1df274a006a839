"""The ladder from data parallel to the decoupled algorithm, each on real actors."""

import statistics
import time

import pytest

from tests.cluster.audit import assert_every_sample_has_one_place, assert_no_work_counts_twice, remains
from tests.cluster.harness import LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def start(cluster, tmp_path):
    runs = []

    def _start(*overrides: str) -> LiveRun:
        runs.append(LiveRun(tmp_path / "run", ["learners=2", *overrides]))
        return runs[-1]

    yield _start
    for run in runs:
        run.close()


def completed(run: LiveRun) -> dict:
    summary = run.wait_done()
    assert summary["status"] == "completed"
    assert summary["work"]["balanced"]
    assert summary["tokens_processed"] >= run.config.train.tokens
    assert summary["eval_loss_final"] < summary["eval_loss_first"]
    assert_no_work_counts_twice(run.events("merge"))
    assert_every_sample_has_one_place(run, summary)
    wait_for("nothing is left in the cluster", lambda: not remains(run.spec))
    return summary


def steps_apart(run: LiveRun) -> int:
    """The most steps that two learners were apart at any merge."""
    counts = [[c["c_steps"] for c in merge["contains"]] for merge in run.events("merge") if not merge["final"]]
    return max(max(steps) - min(steps) for steps in counts)


@pytest.mark.slow
def test_diloco_merges_the_whole_model_of_everybody_while_nobody_steps(start):
    whole = ("diloco.fragments=1", "diloco.overlap_steps=0", "diloco.sync_interval=20")
    run = start("algo=diloco", "pools=mixed", "train.tokens=30000", *whole)
    summary = completed(run)
    merges = [merge for merge in run.events("merge") if not merge["final"]]
    assert len(merges) >= 8
    assert all(len(merge["contains"]) == 2 and merge["clock"] % 20 == 0 for merge in merges)
    assert steps_apart(run) == 0  # a fast learner has waited at the slot
    assert summary["tokens_discarded"] == {}
    samples = [event for event in run.events("learner") if event["step_time"] > 0]
    paces = [
        statistics.median(s["step_time"] for s in samples if s["learner"] == name) for name in run.config.learner_ids
    ]
    assert paces[1] > 1.2 * paces[0]  # three times as long for half the batch
    fast, slow = merges[0]["contains"]
    assert (fast["c_tokens"], slow["c_tokens"]) == (20 * 2 * 32, 20 * 1 * 32)  # the slow pool has half the batch
    assert fast["weight"] == fast["c_tokens"] ** 2 / fast["c_steps"]
    assert {name: learner["pool"] for name, learner in summary["learners"].items()} == {
        "learner-0": "fast",
        "learner-1": "slow",
    }


def test_streaming_merges_fragment_after_fragment_of_everybody(start):
    run = start("algo=streaming", "train.tokens=40000", "diloco.sync_interval=40", "diloco.overlap_steps=4")
    completed(run)
    merges = [merge for merge in run.events("merge") if not merge["final"]]
    assert len(merges) >= 8
    assert all(len(merge["contains"]) == 2 for merge in merges)
    assert {merge["fragment"] for merge in merges} == {0, 1}


def test_data_parallel_goes_on_after_a_learner_was_killed(start):
    run = start("algo=data_parallel", "train.tokens=60000")
    victim = run.learner("learner-1")
    wait_for("it steps", lambda: (s := run.status("learner-1")) and s.steps > 20)
    kill(victim.pid)
    other = run.learner("learner-0")
    wait_for("the other one waits", lambda: (s := run.status("learner-0")) and s.state == "waiting")
    back = wait_for("it is back", lambda: (s := run.status("learner-1")) and s.incarnation > victim.incarnation and s)
    wait_for("it steps again", lambda: (s := run.status("learner-1")) and s.steps > 20)
    assert run.learner("learner-0").incarnation == other.incarnation
    assert back.pid != victim.pid
    struck = time.time()
    wait_for("work of both is merged", lambda: run.merged_since(struck, "learner-1", back.incarnation))
    summary = completed(run)
    assert set(summary["tokens_discarded"]) <= {"died"}
    assert summary["learners"]["learner-1"]["incarnations"] == 2


def test_elastic_data_parallel_goes_on_without_the_dead_and_takes_them_back_in(start):
    run = start(
        "algo=data_parallel",
        "train.elastic=true",
        "learners=3",
        "+pools.dark.min_learners=1",
        "chaos.faults=[{kind: kill_site, target: dark, at_s: 2, seconds: 20}]",
    )
    (dark,) = (name for name in run.config.learner_ids if run.config.pool_of(name).name == "dark")
    others = [name for name in run.config.learner_ids if name != dark]
    struck = wait_for("it is gone", lambda: run.events("fault"))[0]

    def steps(name: str) -> int:
        status = run.status(name)
        return status.steps if status is not None and status.state == "training" else 0

    before = {name: run.learner(name).steps for name in others}
    wait_for("the others go on", lambda: all(steps(name) > before[name] + 20 for name in others))
    assert time.time() < struck["ends_at"]
    back = wait_for("it is back", lambda: (s := run.status(dark)) and s.incarnation > struck["incarnation"] and s)
    wait_for("it steps with them", lambda: (s := run.status(dark)) and s.incarnation and s.steps > 20)
    first = {name: run.learner(name).steps for name in run.config.learner_ids}
    wait_for("all step", lambda: all(steps(name) > first[name] + 20 for name in run.config.learner_ids))
    assert [run.learner(name).incarnation for name in others] == [1, 1]
    assert back.incarnation > 1
    run.finish()
