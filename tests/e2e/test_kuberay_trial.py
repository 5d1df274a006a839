"""The command of docker/kuberay/kind on a cluster whose nodes have the labels and resources of that fleet's pods.

Each node is a real `ray start --block`, as in a pod, and the images' health check is asked on the head.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from below import below
from tests.cluster.harness import wait_for
from tests.dockerfiles import ROOT, steps
from tests.e2e.conftest import TWO, clean_env
from tests.manifests import HEAD, autoscaling_config, cluster_spec, entrypoint, render
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RAY = os.path.join(os.path.dirname(sys.executable), "ray")
STORE = 100 * 1024 * 1024
START_S = 300.0
"""Seconds that `ray start` may take: several are at it at once."""
AGENT_PORT = "52365"
"""Where KubeRay's probes, and the images' own, ask for the node's health."""
TINY = [word for word in TWO if not word.startswith("learners=")]


ENV = {
    "RAY_AUTH_MODE": "token",  # as KubeRay gives it to all pods (authOptions)
    "RAY_AUTH_TOKEN": "of-this-test",
    "RAY_raylet_start_wait_time_s": f"{START_S:.0f}",
}
LOOK = """
import json, ray
from ray._private.state import actors
ray.init(log_to_driver=False, logging_level="error")
groups = {node["NodeID"]: node["Labels"]["test-group"] for node in ray.nodes()}
print(json.dumps([(actor["ActorClassName"], groups[actor["Address"]["NodeID"]]) for actor in actors().values()]))
"""


@dataclass(frozen=True)
class Fleet:
    """A cluster like that of the manifests."""

    env: dict[str, str]
    """Of processes that connect to it."""
    health_port: int


def start_node(group: str, node_type: dict, log: Path, *more: str) -> subprocess.Popen:
    """What the container of a pod of this group runs."""
    labels = {**node_type["labels"], "test-group": group}
    arguments = [
        f"--num-cpus={node_type['resources']['CPU']}",
        f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
        f"--object-store-memory={STORE}",
        *more,
    ]
    with log.open("w") as out:
        env = {**clean_env(), **ENV}
        return subprocess.Popen([RAY, "start", "--block", *arguments], stdout=out, stderr=out, env=env)


def wait_until_up(group: str, node: subprocess.Popen, log: Path) -> None:
    def look() -> bool:
        assert node.poll() is None, log.read_text()
        return "Ray runtime started" in log.read_text()

    wait_for(f"{group} is up", look, START_S)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """The head and one pod of each worker group."""
    types = autoscaling_config(cluster_spec(render("kind/cluster")))["available_node_types"]
    port, health_port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    nodes = []
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="dl") as own:  # paths of sockets must be short
        try:
            for group in sorted(types, key=lambda group: group != HEAD):
                where = [f"--address={address}"]
                if group == HEAD:
                    where = ["--head", f"--port={port}", f"--dashboard-agent-listen-port={health_port}"]
                    where += ["--include-dashboard=false", f"--temp-dir={own}"]
                log = tmp_path / f"{group}.log"
                nodes.append(start_node(group, types[group], log, *where))
                wait_until_up(
                    group, nodes[-1], log
                )  # two that start on one machine at once wait for each other for ever
            yield Fleet({**clean_env(), **ENV, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}, health_port)
        finally:
            family = [process for node in nodes for process in below(node.pid)]
            for process in [*nodes, *family]:  # at once: how a pod is drained is no part of this
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for node in nodes:
                node.wait()
            wait_for("all of it is gone", lambda: not any(process.is_running() for process in family))


def healthy(port: int) -> bool:
    """Whether the health check of the images says so."""
    (check,) = [step.text for step in steps("cpu") if step.name == "HEALTHCHECK"]
    command = json.loads(check.partition(" CMD ")[2])
    assert AGENT_PORT in command[-1]
    command = [sys.executable, *command[1:-1], command[-1].replace(AGENT_PORT, str(port))]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def test_the_trial_runs_on_nodes_like_its_pods(fleet: Fleet, tmp_path: Path) -> None:
    wait_for("the head's health check passes", lambda: healthy(fleet.health_port))
    assert not healthy(free_port())

    folder = tmp_path / "run"
    python, *words = shlex.split(entrypoint("kind"))
    assert python == "python"
    command = [sys.executable, *words, *TINY, f"run.dir={folder}", "train.tokens=60000"]
    done = subprocess.run(command, env=fleet.env, cwd="/", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"

    look = [sys.executable, "-c", LOOK]
    seen = subprocess.run(look, env=fleet.env, capture_output=True, text=True, timeout=60, check=True)
    placed: dict[str, set[str]] = {}
    for kind, group in json.loads(seen.stdout.splitlines()[-1]):
        placed.setdefault(kind, set()).add(group)
    assert placed["Syncer"] == placed["Ledger"] == placed["Evaluator"] == {"services"}
    assert {"stable"} <= placed["Learner"] <= {"stable", "spot"}
