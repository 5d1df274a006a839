"""A run that starts on a head alone gets nodes one by one from Ray's autoscaler, and gives them back."""

import pytest
import ray

from tests.cluster.harness import wait_for
from tests.nodes.test_elastic import left, there
from tests.nodes.test_nodes import check_and_finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON_NODES = (
    "pools.local.cpus_per_worker=1",
    "pools.local.max_learners=3",
    "syncer.cpus=1",  # the head has room for nothing else
    "elastic.backoff_s=0.1",
    # a pool whose nodes there are none of must not keep the other one from growing
    "+pools.never.min_learners=0",
    "+pools.never.max_learners=1",
    "+pools.never.label_selector={zone: nowhere}",
)


def test_nodes_come_one_by_one_spot_first_and_go_when_they_are_not_wanted(elastic, start):
    kubernetes = elastic.kubernetes
    run = start(*ON_NODES)
    first = there(run, "learner-0")
    more = [there(run, name) for name in ("local-0", "local-1")]
    assert len({status.node_id for status in (first, *more)}) == 3
    created = [pod for what, pod in kubernetes.history if what == "created"]
    assert [pod.rpartition("-")[0] for pod in created] == ["spot", "spot", "stable"]
    placed = [event["learner"] for event in run.events("placed")]
    assert placed == ["learner-0", "local-0", "local-1"]

    reclaimed = created[1]  # the node of local-0: each has room for one
    kubernetes.reclaim(reclaimed)
    assert left(run, "local-0", 1) == "left"
    wait_for("the pod is gone", lambda: ("gone", reclaimed) in kubernetes.history)
    before = len(run.events("placed"))
    (newest, *_) = wait_for("another one comes", lambda: run.events("placed")[before:])
    assert there(run, newest["learner"]).node_id not in {status.node_id for status in (first, *more)}

    ray.get(run.actor("supervisor").scale.remote("local", 1), timeout=30)
    wait_for("the others' pods are deleted", lambda: len(kubernetes.living()) == 1)
    assert run.learner("learner-0").incarnation == 1
    check_and_finish(run)
    wait_for("all nodes are given back", lambda: not kubernetes.pods)
