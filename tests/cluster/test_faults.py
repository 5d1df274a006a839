"""Real faults on a living run: what dies, hangs or lies costs its own work and nothing else.

The tests of this module share one run and leave it training.
"""

import contextlib
import os
import signal
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray

from actors.admission import Denied
from actors.ledger import STATE
from actors.spec import LEDGER, SUPERVISOR, SYNCER
from actors.waiting import unplaced
from app.diloco.messages import Contribution, Hello, Report, Sender
from tests.cluster.audit import assert_every_sample_has_one_place
from tests.cluster.harness import LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory):
    live = LiveRun(tmp_path_factory.mktemp("faults") / "run", ["learners=3"])
    yield live
    live.close()


@pytest.fixture(autouse=True)
def _training(run):
    run.wait_training()


def test_a_run_with_a_place_for_everybody_waits_for_none(run):
    assert unplaced(run.spec) == []


def test_a_killed_learner_comes_back_under_a_new_incarnation_and_merges_go_on(run):
    victim, witness = run.learner("learner-1"), run.learner("learner-0")
    struck = time.time()
    kill(victim.pid)
    run.wait_merges(4)  # without it
    back = wait_for(
        "learner-1 is back", lambda: (s := run.status("learner-1")) and s.incarnation > victim.incarnation and s
    )
    assert back.pid != victim.pid
    wait_for("its work is merged again", lambda: run.merged_since(struck, "learner-1", back.incarnation))
    assert not run.merged_since(run.events("leave")[-1]["at"], "learner-1", victim.incarnation)
    assert run.learner("learner-0").pid == witness.pid
    assert run.learner("learner-0").steps > witness.steps
    assert run.syncer().work_exact


def test_a_frozen_learner_holds_nobody_up_and_merges_nothing_stale_when_it_thaws(run):
    frozen = run.learner("learner-2")
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        run.wait_merges(3)
    finally:
        with contextlib.suppress(ProcessLookupError):  # on a very slow machine it was replaced already
            os.kill(frozen.pid, signal.SIGCONT)
    thawed = time.time()
    wait_for(
        "learner-2 goes on or is replaced",
        lambda: (
            (s := run.status("learner-2")) and s.incarnation and run.merged_since(thawed, "learner-2", s.incarnation)
        ),
    )
    seen = set()
    for merge in run.events("merge"):  # no version holds two pieces of one incarnation's work on the same base
        for entry in merge["contains"]:
            piece = (entry["learner"], entry["incarnation"], merge["fragment"], entry["epoch"], entry["round"])
            assert piece not in seen
            seen.add(piece)
    assert run.syncer().work_exact


def test_a_learner_that_hangs_is_replaced(run):
    """Frozen for longer than its deadline, and never thawed: the supervisor ends it and Ray starts it anew."""
    frozen = run.learner("learner-2")
    os.kill(frozen.pid, signal.SIGSTOP)
    stopped = time.time()
    back = wait_for(
        "learner-2 is replaced", lambda: (s := run.status("learner-2")) and s.incarnation > frozen.incarnation and s
    )
    assert back.pid != frozen.pid
    assert not psutil.pid_exists(frozen.pid)
    fault = [event for event in run.events("fault") if event["target"] == "learner-2"][-1]
    assert fault["fault"] == "hang"
    assert fault["struck_at"] < stopped + 1.0  # not when it was noticed, after at least hang_min_s
    assert run.syncer().work_exact


def test_a_killed_syncer_costs_merges_not_steps(run):
    before = run.syncer()
    joins = len(run.events("join"))
    kill(before.pid)

    def started():
        newest = run.events("syncer_started")[-1]
        return newest["epoch"] > before.epoch and newest["at"]

    without_syncer = run.steps_until(started)
    assert min(without_syncer.values()) > 0
    after = run.syncer()
    assert after.epoch == before.epoch + 1
    assert all(new >= old for new, old in zip(after.versions, before.versions, strict=True))
    run.wait_merges(4)
    assert len(run.events("join")) == joins  # nobody had to join again
    assert run.learner("learner-0").incarnation == 1
    assert run.syncer().work_exact
    seen = {}
    for merge in run.events("merge"):
        assert merge["version"] == seen.get(merge["fragment"], 0) + 1
        seen[merge["fragment"]] = merge["version"]


def test_a_frozen_syncer_is_replaced_and_can_do_no_harm(run):
    before = run.syncer()
    os.kill(before.pid, signal.SIGSTOP)
    steps = {name: run.learner(name).steps for name in run.config.learner_ids}
    for name in steps:  # nobody waits for it
        wait_for(f"{name} steps on", lambda name=name: run.learner(name).steps > steps[name] + 20)
    assert psutil.Process(before.pid).status() == psutil.STATUS_STOPPED
    after = wait_for("another syncer answers", lambda: (s := run.status(SYNCER)) and s.pid != before.pid and s)
    assert after.epoch == before.epoch + 1
    assert all(new >= old for new, old in zip(after.versions, before.versions, strict=True))
    run.wait_merges(4)
    assert not psutil.pid_exists(before.pid)


def test_a_frozen_ledger_is_replaced_and_nobody_is_blamed_for_it(run):
    incarnations = {name: run.learner(name).incarnation for name in run.config.learner_ids}
    wait_for("the supervisor hears it", lambda: (s := run.status(SUPERVISOR)) and LEDGER not in s.silent)
    pid = run.call(LEDGER, "pid")
    os.kill(pid, signal.SIGSTOP)
    wait_for("another ledger answers", lambda: (new := run.try_call(LEDGER, "pid")) and new != pid)
    assert not psutil.pid_exists(pid)
    steps = {name: run.learner(name).steps for name in incarnations}
    blocks = run.config.data.block_samples // run.config.train.batch_size
    for name in steps:
        wait_for(
            f"{name} steps on more than was leased",
            lambda name=name: run.learner(name).steps > steps[name] + 4 * blocks,
        )
    assert {name: run.learner(name).incarnation for name in incarnations} == incarnations


def test_a_killed_ledger_costs_nothing(run):
    steps = run.learner("learner-0").steps
    pid, state = run.call(LEDGER, "pid"), run.spec.work_dir / "checkpoints" / STATE
    kill(pid)
    written = state.stat().st_mtime  # it writes before it answers: until it writes again it is away
    without_ledger = run.steps_until(lambda: (now := state.stat().st_mtime) > written and now)
    assert max(without_ledger.values()) > 0
    wait_for("the ledger is back", lambda: (new := run.try_call(LEDGER, "pid")) and new != pid)
    blocks = run.config.data.block_samples // run.config.train.batch_size
    wait_for("more steps than were leased", lambda: run.learner("learner-0").steps > steps + 4 * blocks)


def test_a_killed_supervisor_goes_on_where_it_was(run):
    incarnations = {name: run.learner(name).incarnation for name in run.config.learner_ids}
    pid = run.call(SUPERVISOR, "pid")
    kill(pid)
    wait_for("the supervisor is back", lambda: (new := run.try_call(SUPERVISOR, "pid")) and new != pid)
    wait_for("it sees the run", lambda: (s := run.status(SUPERVISOR)) and s.phase == "running")
    run.wait_merges(4)
    assert {name: run.learner(name).incarnation for name in run.config.learner_ids} == incarnations
    assert len({event["at"] for event in run.events("run_started")}) == 1  # a note may come twice


def test_garbage_is_refused_and_harms_nothing(run):
    syncer = run.syncer()
    sender = Sender(run.spec.run_id, syncer.epoch, "learner-0", run.learner("learner-0").incarnation)
    nothing = Report(sender, 10**9, 0, 0, 0, 0, 0.1, 1.0, (0, 0), ({}, {}), (0, 0))
    garbage = Contribution(sender, 0, 10**9, 0, 1, 64, "fp32", np.zeros(3, np.uint8), "", nothing)
    stale = replace(sender, incarnation=0)
    foreign = replace(sender, run_id="another")
    for bad in (replace(garbage, sender=stale), replace(garbage, sender=foreign)):
        report = replace(nothing, sender=bad.sender)
        run.call(SYNCER, "poll", report, replace(bad, report=report))
    run.call(SYNCER, "poll", nothing, replace(garbage, fragment=99), replace(garbage, payload=None))
    after = run.syncer()
    assert after.refusals["incarnation"] > syncer.refusals.get("incarnation", 0)
    assert after.refusals["foreign"] > syncer.refusals.get("foreign", 0)
    run.wait_merges(2)
    assert run.syncer().work_exact


def test_garbage_of_every_kind_costs_its_sender_and_nobody_else(run):
    """Sent to the real syncer: what no learner sends, and what looks like one of theirs."""
    syncer, before = run.actor(SYNCER), run.syncer()
    victim, witness = run.learner("learner-2"), run.learner("learner-0")
    sender = Sender(run.spec.run_id, before.epoch, "learner-2", victim.incarnation)
    parts = len(before.versions)
    report = Report(sender, 2**40, 0, 0, 0, 0, 0.0, 0.0, (0,) * parts, ({},) * parts, (0,) * parts)
    strided = np.zeros(64, np.uint8)[::2]
    contribution = Contribution(sender, 0, 1, 0, 1, 1, "fp32", strided, "", report)
    calls = [
        syncer.join.remote(None),
        syncer.join.remote(Hello(run.spec.run_id, "../learner-2", run.spec.layout.hash, "local", "t")),
        syncer.join.remote(Hello(run.spec.run_id, "learner-99", run.spec.layout.hash, "local", "t")),
        syncer.join.remote(Hello(run.spec.run_id, "learner-2", run.spec.layout.hash, "local", "t", {"x": "y"})),
        syncer.report.remote(5),
        syncer.poll.remote(None, None, contribution),
    ]
    for _ in range(run.config.diloco.most_garbage):
        calls.append(syncer.poll.remote(replace(report, held=None), replace(contribution, report=5), contribution))
    answers = 0
    for call in calls:
        try:
            ray.get(call, timeout=20.0)
            answers += 1
        except Denied:
            continue
    assert answers == len(calls) - 4
    wait_for("it is fenced", lambda: [e for e in run.events("leave") if e["reason"] == "garbage"])
    wait_for("it is back", lambda: (s := run.status("learner-2")) and s.incarnation > victim.incarnation and s)
    run.wait_merges(4)
    assert run.syncer().pid == before.pid
    assert run.learner("learner-0").pid == witness.pid
    assert run.syncer().work_exact


def test_the_run_ends_with_a_balanced_account_and_leaves_nothing_behind(run):
    pids = run.pids()
    summary = run.finish()
    assert summary["status"] == "stopped"
    work = summary["work"]
    assert work["outstanding"] == 0
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    assert_every_sample_has_one_place(run, summary)
    assert summary["syncer"]["incarnations"] == 3
    assert summary["learners"]["learner-1"]["incarnations"] == 2
    assert {fault["kind"] for fault in summary["faults"]} >= {"died", "hang"}
    assert [fault["kind"] for fault in summary["faults"] if fault["target"] == "syncer"] == ["died", "hang"]
    assert len(summary["syncer"]["recoveries_s"]) == 2
    wait_for("all processes of the run are gone", lambda: not any(psutil.pid_exists(pid) for pid in pids))
    for name in (*run.config.learner_ids, SYNCER, SUPERVISOR, LEDGER):
        with pytest.raises(ValueError):
            run.actor(name)
    names = {run.spec.group_name(name) for name in run.config.learner_ids}
    from ray.util import placement_group_table

    left = [entry for entry in placement_group_table().values() if entry["name"] in names]
    assert all(entry["state"] == "REMOVED" for entry in left)
    assert ray.is_initialized()
