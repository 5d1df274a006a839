"""A learner whose workers are on several nodes."""

import psutil
import pytest

from tests.cluster.harness import wait_for
from tests.nodes.test_nodes import check_and_finish

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

PAIR = (
    "learners=2",
    "+pools.pair.min_learners=1",
    "+pools.pair.workers_per_learner=2",
    "+pools.pair.one_node=false",
    "+pools.pair.sharded=true",
    "+pools.pair.cpus_per_worker=1",
    "+pools.pair.label_selector={zone: pair}",
    "pools.local.label_selector={for: learners}",
    "elastic.backoff_s=0.1",
)


def pair(run, after):
    """Status of the learner that spans nodes, once its work was merged under a later incarnation."""
    back = wait_for("it is there", lambda: (s := run.status("learner-1")) and s.incarnation > after and s.ranks and s)
    wait_for("its work is merged", lambda: run.merged_since(0, "learner-1", back.incarnation))
    return back


def test_the_node_of_one_worker_is_lost_and_the_group_comes_back_with_another(nodes, start):
    run = start(*PAIR)
    run.syncer()  # and with it the services are where there is room for nobody else
    first, second = nodes.add(1, zone="pair"), nodes.add(1, zone="pair")
    before = pair(run, 0)
    (rank,) = before.ranks
    assert {before.node_id, rank.node_id} == {first, second}
    nodes.kill(rank.node_id)  # and that worker with it
    wait_for("rank 0 has ended", lambda: not psutil.pid_exists(before.pid))
    run.wait_merges(2)  # of the other learner
    third = nodes.add(1, zone="pair")
    after = pair(run, before.incarnation)
    assert {after.node_id, *(rank.node_id for rank in after.ranks)} == {first, second, third} - {rank.node_id}
    assert run.learner("learner-0").incarnation == 1

    nodes.drain(after.ranks[0].node_id, 60)  # the cloud wants the node of one worker back
    wait_for("it has left", lambda: [e for e in run.events("leave") if e["reason"] == "left"])
    nodes.add(1, zone="pair")
    pair(run, after.incarnation)
    check_and_finish(run)
