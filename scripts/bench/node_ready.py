"""How soon a new node trains: `python scripts/bench/node_ready.py [--nodes N] [KEY=VALUE]`.

A real run with one learner, on a cluster of one node. A second node joins, marked as spot; its pool's standing request
is met, and its learner joins the run. When it has stepped the node is lost, and another one comes. Before each node a
bare start is made under the same load: a process that imports torch and transformers and builds the model. Prints a
line for each and, last, one JSON line: seconds from when Ray knows the node to its learner's first step, their median,
and `ratio`, that to a bare start. Exits with 1 when `ratio` is above 1.5.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from actors.driver import prepare_run
from actors.learner import LearnerStatus
from actors.spec import RunSpec
from actors.start import start_supervisor
from app.config import load
from app.run.folder import open_folder
from live import CALL_S, nothing_left, wait
from options import positive
from storming.runs import bare_start

NEVER = 10**12
STORE = 200 * 1024 * 1024
WANTED_RATIO = 1.5
STABLE, NEW = "learner-0", "spot-0"
POOLS = (
    "learners=1",
    "+pools.spot.min_learners=0",
    "+pools.spot.max_learners=1",
    "+pools.spot.spot=true",
    "pools.local.label_selector={ray.io/market-type: '!spot'}",
    "elastic.backoff_s=0.1",
    "elastic.backoff_most_s=0.1",
)


def main() -> int:
    """Run, add nodes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=positive, default=4, help="nodes that come and go, one by one; 4 by default")
    parser.add_argument("overrides", nargs="*", help="for example run.preload=false")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, nothing_left():
        quiet = [f"train.tokens={NEVER}", f"eval.every_tokens={NEVER}", "run.shared_dir=true"]
        config = load([f"run.dir={folder}/run", *POOLS, *quiet, *arguments.overrides])
        spec = prepare_run(config, open_folder(config))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE})
        ray.init(address=cluster.address, namespace=spec.namespace, log_to_driver=False)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ray.init sets one of its own
        try:
            start_supervisor(spec)
            wait(f"{STABLE} trains", partial(stepping, spec, STABLE, 0))
            figures = measure(spec, cluster, arguments.nodes)
        finally:
            ray.shutdown()
            cluster.shutdown()
    print(json.dumps(figures | {"preload": config.run.preload}))
    return 0 if figures["ratio"] <= WANTED_RATIO else 1


def measure(spec: RunSpec, cluster: Cluster, nodes: int) -> dict[str, Any]:
    """The figures of all nodes."""
    first_steps, bare, after = [], [], 0
    for _ in range(nodes):
        bare.append(bare_start())
        before = alive()
        node = cluster.add_node(
            wait=False, num_cpus=1, object_store_memory=STORE, labels={"ray.io/market-type": "spot"}
        )
        wait("the node is there", partial(_more_than, before))
        ready = time.time()
        status = wait("its learner steps", partial(stepping, spec, NEW, after))
        first_steps.append(status.stepped_at - (status.steps - 1) * status.step_time - ready)
        after = status.incarnation
        print(f"first step after {first_steps[-1]:.1f} s; a bare start {bare[-1]:.1f} s", flush=True)
        cluster.remove_node(node)
    return {
        "ratio": statistics.median(first_steps) / statistics.median(bare),
        "first_step_s": statistics.median(first_steps),
        "bare_start_s": statistics.median(bare),
        "first_steps_s": first_steps,
        "bare_starts_s": bare,
    }


def alive() -> set[str]:
    """Ids of the nodes that Ray knows of."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _more_than(before: set[str]) -> set[str] | None:
    return alive() - before or None


def stepping(spec: RunSpec, learner: str, after: int) -> LearnerStatus | None:
    """The learner's status, if it has stepped under an incarnation after that one."""
    try:
        actor = ray.get_actor(learner, namespace=spec.namespace)
        status: LearnerStatus = ray.get(actor.status.remote(), timeout=CALL_S)
    except (ValueError, RayError, TimeoutError):
        return None
    return status if status.incarnation > after and status.steps > 0 else None


if __name__ == "__main__":
    sys.exit(main())
