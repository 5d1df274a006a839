"""A run that asks for more than any node has: what is missing is named, and a stop ends it."""

import pytest

from actors.waiting import unplaced
from tests.cluster.harness import wait_for

pytestmark = pytest.mark.timeout(120)


def test_what_has_no_place_is_named_and_can_be_stopped(start):
    run = start("syncer.cpus=64", "pools.local.cpus_per_worker=3")  # on 4 CPUs
    wanted = {"a node with 64 CPU for the syncer", "3 CPU to become free for learner-1"}
    wait_for("both are named", lambda: set(unplaced(run.spec)) == wanted)
    summary = run.finish()
    assert (summary["status"], summary["tokens_processed"]) == ("stopped", 0)
