"""Whole nodes die, the raylet and all on it: the syncer's by this file's own hand, learners' by the `chaos` group."""

import pytest

from tests.cluster.audit import assert_every_sample_has_one_place, assert_no_work_counts_twice, remains
from tests.cluster.harness import wait_for

pytestmark = pytest.mark.timeout(400)

SYNCER_CPUS = 2
ON_LEARNERS_NODES = "pools.local.label_selector={for: learners}"


def pair(run, leader_node, other_node):
    """Status of the syncer that leads, once it does so on that node and another one follows on the other."""

    def look():
        answers = [answer for name in run.spec.syncers if (answer := run.status(name)) is not None]
        leaders = {answer.node_id: answer for answer in answers if hasattr(answer, "epoch")}
        followers = {answer.node_id for answer in answers if not hasattr(answer, "epoch")}
        return leaders.get(leader_node) if followers == {other_node} else None

    return wait_for("one leads and another one follows elsewhere", look)


def take_over(run, nodes, before):
    """Kill the leader's node; another one leads before Ray takes that node for dead."""
    nodes.kill(before.node_id)
    wait_for("another one has started to lead", lambda: run.events("syncer_started")[-1]["epoch"] > before.epoch)
    assert before.node_id in nodes.alive()
    after = wait_for("it leads", lambda: (s := run.leading()) and s.epoch > before.epoch and s)
    assert after.epoch == before.epoch + 1
    assert all(new >= old for new, old in zip(after.versions, before.versions, strict=True))
    run.wait_merges(4)
    return after


def again(run, name, lost):
    """The learner's status once it has joined from another node than the lost one."""
    status = run.status(name)
    return status if status and status.incarnation and status.node_id != lost else None


def check_and_finish(run):
    assert run.syncer().work_exact
    assert_no_work_counts_twice(run.events("merge"))
    summary = run.finish()
    work = summary["work"]
    assert work["outstanding"] == 0
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    assert_every_sample_has_one_place(run, summary)
    wait_for("nothing is left in the cluster", lambda: not remains(run.spec))
    return summary


@pytest.mark.slow
def test_two_nodes_of_the_syncer_are_lost_one_after_the_other(nodes, start):
    first = nodes.add(2 * SYNCER_CPUS)
    run = start(
        ON_LEARNERS_NODES,
        "syncer.standby=true",
        f"syncer.cpus={SYNCER_CPUS}",
        "data.block_samples=4096",  # learners have data, wherever their ledger was
    )
    run.wait_training()
    wait_for("both are there", lambda: all(run.status(name) for name in run.spec.syncers))
    assert {run.status(name).node_id for name in run.spec.syncers} == {first}
    second = nodes.add(2 * SYNCER_CPUS)
    before = pair(run, first, second)  # where there is another node, it goes there
    after = take_over(run, nodes, before)
    assert after.node_id == second
    third = nodes.add(2 * SYNCER_CPUS)
    last = take_over(run, nodes, pair(run, second, third))
    assert last.node_id == third
    assert {run.learner(name).incarnation for name in run.config.learner_ids} == {1}
    summary = check_and_finish(run)
    assert summary["syncer"]["incarnations"] == 3
    assert len(summary["syncer"]["recoveries_s"]) == 2


def test_learners_whose_node_is_lost_come_back_on_another_one(nodes, start):
    run = start(
        "pools.local.label_selector={zone: far}",
        "chaos.faults=[{kind: kill_node, at_s: 1}]",
    )
    run.syncer()  # and with it all services are where no learner will be
    wait_for("the ledger answers", lambda: run.try_call("ledger", "pid"))
    far = {nodes.add(1, zone="far"), nodes.add(1, zone="far")}
    faults = wait_for("a node is struck", lambda: run.events("fault"))
    (lost,) = {fault["node"] for fault in faults}
    assert lost in far
    nodes.bury(lost)
    wait_for("Ray takes it for dead", lambda: lost not in nodes.alive())
    for name in run.config.learner_ids:  # the fault is told learner by learner: not all may have been on the tape
        back = wait_for(f"{name} is there", lambda name=name: again(run, name, lost))
        assert {back.node_id} == far - {lost}
        wait_for("its work is merged", lambda b=back: run.merged_since(0, b.learner, b.incarnation))
    for fault in run.events("fault"):
        assert run.status(fault["target"]).incarnation > fault["incarnation"]
    summary = check_and_finish(run)
    assert {f["kind"] for f in summary["faults"]} == {"kill_node"}
    assert all(f["recovered_s"] > 0 for f in summary["faults"])
