"""A cluster of several nodes on this machine: nodes join and die, the head stays."""

import contextlib
import subprocess

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from below import gone, raylet_of
from tests.cluster.harness import LiveRun, wait_for
from tests.started import RAY

STORE = 100 * 1024 * 1024


class Nodes:
    """Adds nodes; `head` has room for learners only."""

    def __init__(self):
        head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "labels": {"for": "learners"}}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, namespace="tests", log_to_driver=False, logging_level="error")
        self._raylets = {}

    def add(self, cpus, **labels):
        """Another node; returns its id."""
        before = self.alive()
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE, labels=labels)
        (new,) = self.alive() - before
        self._raylets[new] = node.all_processes["raylet"][0].process
        return new

    def kill(self, node_id):
        """SIGKILL of the node's raylet; what it runs ends with it."""
        self._raylets[node_id].kill()
        self.bury(node_id)

    def drain(self, node_id, seconds):
        """Tell the node that it has so many seconds left, as a cloud does that takes a machine back."""
        command = [RAY, "drain-node", "--address", self._cluster.address, "--node-id", node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        subprocess.run([*command, "--deadline-remaining-seconds", str(seconds)], check=True, capture_output=True)

    def bury(self, node_id):
        """Wait until a node's raylet has ended, and all that it ran."""
        raylet = self._raylets[node_id]
        raylet.wait()
        wait_for("all on the node is gone", lambda: not [p for p in psutil.process_iter() if _of(p, raylet.pid)])

    def alive(self):
        """Ids of the nodes that Ray takes for living."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def close(self):
        ray.shutdown()
        self._cluster.shutdown()


def _of(process, raylet):
    return raylet_of(process) == raylet and not gone(process)


@pytest.fixture(scope="package")
def nodes():
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def start(nodes, tmp_path):
    """Starts a run with two learners in the test's own folder, which is the same for all nodes."""
    with contextlib.ExitStack() as stack:

        def begin(*overrides):
            run = LiveRun(tmp_path / "run", ["learners=2", "run.shared_dir=true", *overrides])
            stack.callback(run.close)
            return run

        yield begin
