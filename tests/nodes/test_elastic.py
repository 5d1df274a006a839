"""Pools grow when nodes appear and shrink when told to; learners hand in before their nodes go."""

import pytest
import ray

from actors.start import find_supervisor
from tests.cluster.harness import kill, wait_for
from tests.nodes.test_nodes import check_and_finish

pytestmark = pytest.mark.timeout(400)

SPOT = {"ray.io/market-type": "spot"}
ELASTIC = (
    "learners=1",
    "+pools.spot.min_learners=0",
    "+pools.spot.max_learners=2",
    "+pools.spot.spot=true",
    "+pools.spot.cpus_per_worker=1",
    "pools.local.label_selector={for: learners}",
    "elastic.backoff_s=0.1",
)


@pytest.fixture
def spot(nodes):
    """Adds nodes that are marked as spot and have room for one learner."""
    made = []

    def add():
        made.append(nodes.add(1, **SPOT))
        return made[-1]

    yield add
    for node in made:
        if node in nodes.alive():
            nodes.kill(node)


def there(run, learner):
    """The learner's status once its work was merged."""
    status = run.learner(learner)
    wait_for("its work is merged", lambda: run.merged_since(0, learner, status.incarnation))
    return status


def left(run, learner, incarnation):
    """The tape says why this incarnation has left, and that its place was given back."""

    def look():
        reasons = [
            e["reason"] for e in run.events("leave") if (e["learner"], e["incarnation"]) == (learner, incarnation)
        ]
        return reasons and [e for e in run.events("removed") if e["learner"] == learner] and reasons[0]

    return wait_for(f"{learner} has left", look)


@pytest.mark.slow
def test_a_node_that_appears_gets_a_learner_and_one_that_goes_takes_it_along(nodes, spot, start):
    run = start(*ELASTIC)
    assert there(run, "learner-0").node_id
    assert run.status("spot-0") is None  # nothing but a request
    first = spot()
    assert there(run, "spot-0").node_id == first
    second = spot()
    assert there(run, "spot-1").node_id == second

    nodes.drain(first, 60)  # the cloud wants it back
    assert left(run, "spot-0", 1) == "left"
    nodes.kill(first)
    nodes.kill(second)  # and this one goes without a word
    assert left(run, "spot-1", 1) != "left"
    before = len(run.events("placed"))
    third = spot()
    (newest, *_) = wait_for("a learner gets the new node", lambda: run.events("placed")[before:])
    assert there(run, newest["learner"]).node_id == third
    assert run.learner("learner-0").incarnation == 1
    assert {run.syncer().node_id} <= nodes.alive() - {third}
    summary = check_and_finish(run)
    assert set(summary["learners"]) == {"learner-0", "spot-0", "spot-1", newest["learner"]}
    assert summary["learners"]["spot-0"]["pool"] == "spot"


@pytest.mark.slow
def test_a_pool_is_scaled_while_the_run_goes_on(spot, start):
    run = start(*ELASTIC, "+pools.spot.batch_size=2")
    added = {spot(), spot()}
    before = [there(run, name) for name in ("spot-0", "spot-1")]
    assert {status.node_id for status in before} == added
    supervisor = find_supervisor(run.spec.run_id)
    ray.get(supervisor.scale.remote("spot", 1), timeout=30)
    assert left(run, "spot-1", before[1].incarnation) == "left"
    with pytest.raises(ValueError, match="the pools are local, spot"):
        ray.get(supervisor.scale.remote("sport", 1), timeout=30)
    killed = ray.get(supervisor.pid.remote(), timeout=30)
    kill(killed)  # its next process knows what it was told
    wait_for("it is back", lambda: run.try_call("supervisor", "pid") not in (None, killed))
    ray.get(run.actor("supervisor").scale.remote("local", 2), timeout=30)
    there(run, "local-0")
    assert run.status("spot-1") is None
    assert run.learner("spot-0").incarnation == before[0].incarnation
    summary = check_and_finish(run)
    assert summary["tokens_discarded"].get("died", 0) == 0


def test_too_little_time_skips_the_hand_in_and_corrupts_nothing(nodes, spot, start):
    run = start(*ELASTIC)
    node = spot()
    there(run, "spot-0")
    nodes.drain(node, 1)
    assert left(run, "spot-0", 1)
    nodes.kill(node)
    run.wait_merges(4)
    check_and_finish(run)
