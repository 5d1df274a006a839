"""A head, Ray's own autoscaler, and a Kubernetes of this folder that gives it nodes: `ray start --block` as pods."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from below import below
from tests.autoscaler.kubernetes import HEAD_POD, Kubernetes
from tests.cluster.harness import LiveRun, wait_for

RAY = str(Path(sys.executable).with_name("ray"))
STORE = 100 * 1024 * 1024
IDLE_S = 3
GRACE_S = 40
DRAIN_S = 15
"""A node that gets SIGTERM leaves its actors so much time."""


def group(name: str, most: int, priority: int, **labels: str) -> dict:
    """A worker group whose pods have one CPU."""
    container = {"name": "ray", "image": "ray", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": GRACE_S}}
    return {
        "groupName": name,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": most,
        "priority": priority,
        "labels": labels,
        "resources": {"CPU": "1"},
        "rayStartParams": {},
        "template": template,
    }


def raycluster() -> dict:
    """Two spot nodes, which come first, and a stable one."""
    container = {"name": "ray", "image": "ray", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    head = {
        "rayStartParams": {"num-cpus": "1"},
        "resources": {"CPU": "1"},
        "template": {"spec": {"containers": [container]}},
    }
    groups = [
        group("stable", 1, 0, **{"ray.io/market-type": "on-demand"}),
        group("spot", 2, 10, **{"ray.io/market-type": "spot"}),
    ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "fleet", "namespace": "default"},
        "spec": {
            "rayVersion": ray.__version__,
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": IDLE_S},
            "headGroupSpec": head,
            "workerGroupSpecs": groups,
        },
    }


class Elastic:
    """The cluster: a head that has room for services only, and whatever the autoscaler asks for."""

    def __init__(self, folder: Path):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._short = Path(f"/tmp/as{self.address.split(':')[1]}")  # socket paths must be short
        self._short.mkdir()
        port = self.address.split(":")[1]
        head = ["--head", f"--port={port}", "--num-cpus=1", "--no-monitor", "--include-dashboard=false"]
        env = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_POD, "RAY_NODE_TYPE_NAME": "headgroup"}
        self._head = self._ray("head", ["start", "--block", *head, *self._apart("head")], env)
        wait_for("the head is up", lambda: "started" in (folder / "head.log").read_text())
        self.kubernetes = Kubernetes(raycluster(), self._start_pod, folder)
        secrets = self.kubernetes.certificate
        env |= {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self.kubernetes.port),
            "RAY_HEAD_POD_NAME": HEAD_POD,
            "RAY_KUBERAY_CA_CERT_PATH": str(secrets),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(secrets),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(self.kubernetes.key),
        }
        where = ["--cluster-name", "fleet", "--cluster-namespace", "default", "--gcs-address", self.address]
        self._autoscaler = self._ray("autoscaler", ["kuberay-autoscaler", *where], env)

    def _ray(self, name: str, arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("w") as log:
            command = [RAY, *arguments]
            env = {**os.environ, "RAY_AUTH_MODE": "disabled", **env}  # pytest has no token
            return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def _apart(self, name: str) -> list[str]:
        return [f"--temp-dir={self._short}/{name}", f"--object-store-memory={STORE}"]

    def _start_pod(self, group: dict, name: str) -> subprocess.Popen[bytes]:
        labels = ",".join(f"{key}={value}" for key, value in group["labels"].items())
        ports = ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        node = [f"--address={self.address}", f"--num-cpus={group['resources']['CPU']}", f"--labels={labels}", *ports]
        env = {
            "RAY_CLOUD_INSTANCE_ID": name,
            "RAY_NODE_TYPE_NAME": group["groupName"],
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
        }
        return self._ray(name, ["start", "--block", *node, *self._apart(name)], env)

    def close(self) -> None:
        """End everything."""
        processes = [self._autoscaler, self._head]
        family = [p for each in processes for p in below(each.pid)]
        self._autoscaler.terminate()
        self.kubernetes.close()
        self._head.terminate()
        for each in processes:
            each.wait(60)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._short, ignore_errors=True)


@pytest.fixture
def elastic(tmp_path):
    fleet = Elastic(tmp_path)
    try:
        ray.init(address=fleet.address, namespace="tests", log_to_driver=False, logging_level="error")
        yield fleet
    finally:
        ray.shutdown()
        fleet.close()


@pytest.fixture
def start(elastic, tmp_path):
    """Starts a run with one learner and no more in the test's own folder, which is the same for all nodes."""
    with contextlib.ExitStack() as stack:

        def begin(*overrides):
            run = LiveRun(tmp_path / "run", ["learners=1", "run.shared_dir=true", *overrides])
            stack.callback(run.close)
            return run

        yield begin
