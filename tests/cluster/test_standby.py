"""A hot standby on one node: it takes over from a syncer that is killed or frozen, and nothing of it is lost.

The tests of this module share one run and leave it training, with a syncer that leads and one that follows.
"""

import os
import signal
import time

import psutil
import pytest
import ray

from actors.publishing import follower_of
from actors.spec import SYNCER
from app.diloco.durable import Durable, whole_state
from app.diloco.shadow import Shadow
from app.run.journal import Journal
from app.run.storage import open_store
from tests.cluster.audit import assert_every_sample_has_one_place, assert_no_work_counts_twice, remains
from tests.cluster.harness import LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(240)

AFTER_S = 2.0


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory):
    live = LiveRun(
        tmp_path_factory.mktemp("standby") / "run",
        [
            "learners=2",
            "syncer.standby=true",
            f"syncer.standby_after_s={AFTER_S}",
            "diloco.hang_min_s=60",  # whoever is frozen here thaws: nobody ends it
            "checkpoint.snapshot_every_merges=100000",
        ],
    )
    yield live
    live.close()


@pytest.fixture(autouse=True)
def _training(run):
    run.wait_training()
    following(run)


def following(run):
    """The answer of the syncer that follows."""

    def look():
        answers = [run.status(name) for name in run.spec.syncers]
        return next((a for a in answers if a is not None and not hasattr(a, "epoch")), None)

    return wait_for("a syncer follows", look)


def started_after(run, epoch):
    """When a syncer of a later epoch has started, once it has."""
    newest = run.events("syncer_started")[-1]
    return newest["epoch"] > epoch and newest["at"]


def assert_went_on(run, before):
    """Every version that there was is there, none was made twice, and nobody had to join again."""
    after = run.syncer()
    assert all(new >= old for new, old in zip(after.versions, before.versions, strict=True))
    made = [(m["fragment"], m["version"]) for m in run.events("merge")]
    told = sorted({*made, *((m["fragment"], m["version"]) for m in run.events("merge_recovered"))})
    assert len(made) == len(set(made))
    for fragment in range(run.config.diloco.fragments):
        versions = [version for p, version in told if p == fragment]
        assert versions == list(range(1, len(versions) + 1))
    assert len(run.events("join")) == len(run.config.learner_ids)
    assert after.work_exact


def test_the_standby_follows_and_refuses_learners(run):
    leader, standby = run.syncer(), following(run)
    assert leader.pid != standby.pid
    assert len(run.events("syncer_started")) == leader.epoch - 1 == 1  # epoch 1 is the driver's


def test_a_killed_syncer_is_followed_by_its_standby(run):
    before, standby = run.syncer(), following(run)
    kill(before.pid)
    after = wait_for("the standby leads", lambda: (s := run.leading()) and s.epoch > before.epoch and s)
    assert (after.pid, after.epoch) == (standby.pid, before.epoch + 1)
    run.wait_merges(4)
    assert following(run).pid not in (before.pid, standby.pid)
    assert_went_on(run, before)


@pytest.mark.parametrize("alone", [True, False])
def test_a_frozen_syncer_is_replaced_and_follows_once_it_thaws(run, alone):
    """Alone, when nobody asks it anything more, or with a learner that has heard of no other syncer when both go on."""
    before, learner = run.syncer(), run.learner("learner-1")
    stopped = time.time()
    try:
        if not alone:
            os.kill(learner.pid, signal.SIGSTOP)
        os.kill(before.pid, signal.SIGSTOP)
        without_syncer = run.steps_until(lambda: started_after(run, before.epoch), "learner-0")
        assert without_syncer["learner-0"] > 0
        after = wait_for("the standby leads", lambda: (s := run.leading()) and s.epoch > before.epoch and s)
        assert after.pid != before.pid
        run.wait_merges(4)
        assert psutil.Process(before.pid).status() == psutil.STATUS_STOPPED
    finally:
        thawed = time.time()
        os.kill(before.pid, signal.SIGCONT)
        os.kill(learner.pid, signal.SIGCONT)
    wait_for("the old process has left", lambda: not psutil.pid_exists(before.pid))
    wait_for("learner-1 goes on", lambda: run.merged_since(thawed, "learner-1", learner.incarnation))
    assert run.learner("learner-1").pid == learner.pid
    assert following(run).pid not in (before.pid, after.pid)
    assert run.syncer().pid == after.pid
    assert run.syncer().epoch == before.epoch + 1
    wait_for("it is told", lambda: [f for f in run.events("fault") if f["incarnation"] == before.epoch])
    fault = run.events("fault")[-1]
    assert (fault["target"], fault["fault"]) == (SYNCER, "died")
    assert fault["struck_at"] < stopped  # not when it was noticed
    assert {event["target"] for event in run.events("fault")} == {SYNCER}
    assert_went_on(run, before)


@pytest.mark.parametrize("leads", [False, True])
def test_a_syncer_that_is_ended_for_good_is_made_anew(run, leads):
    before, standby = run.syncer(), following(run)
    name = next(name for name in run.spec.syncers if hasattr(run.status(name), "epoch") == leads)
    ray.kill(run.actor(name), no_restart=True)
    wait_for("it is made anew", lambda: (s := run.status(name)) and s.pid not in (before.pid, standby.pid))
    after = wait_for("one leads", run.leading)
    assert after.pid == (standby.pid if leads else before.pid)
    assert following(run).pid not in (before.pid, standby.pid)
    run.wait_merges(4)
    assert_went_on(run, before)


def test_the_run_ends_with_a_balanced_account_and_its_values_are_those_of_the_journal(run):
    pids = run.pids()
    epochs = [event["epoch"] for event in run.events("syncer_started")]
    assert epochs == sorted(set(epochs))
    summary = run.finish()
    work = summary["work"]
    assert work["outstanding"] == 0
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    assert_no_work_counts_twice(run.events("merge"))
    assert_every_sample_has_one_place(run, summary)
    assert summary["syncer"]["incarnations"] == len(epochs) == 5
    assert len(summary["syncer"]["recoveries_s"]) == 4
    wait_for("all processes of the run are gone", lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not remains(run.spec)
    assert_values_are_those_of_the_records(run)


def assert_values_are_those_of_the_records(run):
    """Θ, momentum and average of the last syncer, to the bit, from version 0 and all records of all of them."""
    store, config = open_store(str(run.spec.checkpoints)), run.config
    first, last = (name for name in store.names("snapshot-"))
    theirs = follower_of(run.spec)
    held = whole_state(theirs.catch_up().protocol(99))
    store.delete(last)
    store.delete("latest.json")
    base, records = Journal(store, config.checkpoint.keep).load()
    assert f"{base.seq:012d}" in first
    shadow = Shadow(
        run.spec.run_id, run.spec.layout, config.diloco, config.train.tokens, Durable(base.meta, base.tensors)
    )
    for record in records:
        shadow.apply(Durable(record.meta, record.tensors))
    replayed = whole_state(shadow.protocol(99))
    assert held.tensors.keys() == replayed.tensors.keys()
    for name, tensor in held.tensors.items():
        assert tensor.equal(replayed.tensors[name]), name
