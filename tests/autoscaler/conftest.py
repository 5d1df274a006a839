"""A head, Ray's own autoscaler, and a Kubernetes of this folder that gives it nodes: `ray start --block` as pods."""

import contextlib
import subprocess
from pathlib import Path

import pytest
import ray

from tests.autoscaler.kubernetes import HEAD_POD, Kubernetes
from tests.cluster.harness import LiveRun
from tests.started import Started

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
        self._started = Started(folder)
        env = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_POD, "RAY_NODE_TYPE_NAME": "headgroup"}
        self._started.head("head", 1, "--no-monitor", env=env)
        self.address = self._started.address
        self.kubernetes = Kubernetes(raycluster(), self._start_pod, folder)
        env |= {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self.kubernetes.port),
            "RAY_HEAD_POD_NAME": HEAD_POD,
            "RAY_KUBERAY_CA_CERT_PATH": str(self.kubernetes.certificate),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(self.kubernetes.certificate),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(self.kubernetes.key),
        }
        where = ["--cluster-name", "fleet", "--cluster-namespace", "default", "--gcs-address", self.address]
        self._autoscaler = self._started.run("autoscaler", ["kuberay-autoscaler", *where], env)

    def _start_pod(self, group: dict, name: str) -> subprocess.Popen[bytes]:
        env = {
            "RAY_CLOUD_INSTANCE_ID": name,
            "RAY_NODE_TYPE_NAME": group["groupName"],
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
        }
        return self._started.node(name, int(group["resources"]["CPU"]), group["labels"], env)

    def close(self) -> None:
        """End everything; the autoscaler first, which would ask for more."""
        self._autoscaler.terminate()
        self._autoscaler.wait(60)
        self.kubernetes.close()
        self._started.close()


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
