"""A stand-in for what Ray's autoscaler needs of Kubernetes: one RayCluster and its pods, over HTTPS on loopback.

It does what the API server and the KubeRay operator do together: keeps the RayCluster, takes patches of it, and holds
the pods against its worker groups. A pod is a real process, started by the caller's `start`; a pod that is deleted, or
reclaimed by its cloud, gets SIGTERM, and SIGKILL when its grace period is over.
"""

import datetime
import ipaddress
import json
import re
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HEAD_POD = "head"
LOOK_EVERY_S = 0.2
Group = dict[str, Any]


@dataclass
class Pod:
    """A worker of a group."""

    name: str
    group: str
    process: subprocess.Popen[bytes]
    ends_by: float | None = None
    """When (monotonic clock) it is killed; None while it is not being deleted."""


@dataclass
class Kubernetes:
    """The API server and the operator."""

    cluster: dict[str, Any]
    """The RayCluster, as kubectl would print it."""
    start: Callable[[Group, str], subprocess.Popen[bytes]]
    """Starts the process of a pod of this group and name."""
    folder: Path
    """For certificates."""
    pods: dict[str, Pod] = field(default_factory=dict)
    history: list[tuple[str, str]] = field(default_factory=list)
    """(what happened, to which pod), in order."""

    def __post_init__(self) -> None:
        self.cluster["metadata"].setdefault("resourceVersion", "1")
        self._lock = threading.RLock()
        self._count = 0
        self._stop = threading.Event()
        self.certificate, key = certificate(self.folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.key = key
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._threads = [threading.Thread(target=self._server.serve_forever), threading.Thread(target=self._reconcile)]
        for thread in self._threads:
            thread.start()

    # ---- for tests

    def reclaim(self, name: str) -> None:
        """The cloud takes the pod's machine back: SIGTERM, and no more after the grace period."""
        with self._lock:
            self._delete(self.pods[name], "reclaimed")

    def living(self, group: str | None = None) -> list[str]:
        """Pods that are not being deleted."""
        with self._lock:
            return [pod.name for pod in self.pods.values() if pod.ends_by is None and group in (None, pod.group)]

    def close(self) -> None:
        """End all pods and the server."""
        self._stop.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        for pod in self.pods.values():
            pod.process.terminate()
        for pod in self.pods.values():
            try:
                pod.process.wait(30)
            except subprocess.TimeoutExpired:
                pod.process.kill()
                pod.process.wait()

    # ---- the operator

    def _reconcile(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            with self._lock:
                self._bury()
                for group in self.cluster["spec"]["workerGroupSpecs"]:
                    for name in group.get("scaleStrategy", {}).get("workersToDelete", []):
                        if name in self.pods and self.pods[name].ends_by is None:
                            self._delete(self.pods[name], "deleted")
                    wanted = min(max(group.get("replicas", 0), group["minReplicas"]), group["maxReplicas"])
                    for _ in range(wanted - len(self.living(group["groupName"]))):
                        self._create(group)

    def _create(self, group: Group) -> None:
        self._count += 1
        name = f"{group['groupName']}-{self._count}"
        self.pods[name] = Pod(name, group["groupName"], self.start(group, name))
        self._changed("created", name)

    def _delete(self, pod: Pod, what: str) -> None:
        (group,) = [g for g in self.cluster["spec"]["workerGroupSpecs"] if g["groupName"] == pod.group]
        pod.ends_by = time.monotonic() + group["template"]["spec"]["terminationGracePeriodSeconds"]
        pod.process.send_signal(signal.SIGTERM)
        self._changed(what, pod.name)

    def _bury(self) -> None:
        for pod in list(self.pods.values()):
            if pod.ends_by is not None and time.monotonic() > pod.ends_by and pod.process.poll() is None:
                pod.process.kill()
            if pod.process.poll() is not None:
                del self.pods[pod.name]
                self._changed("gone", pod.name)

    def _changed(self, what: str, name: str) -> None:
        self.history.append((what, name))
        self.cluster["metadata"]["resourceVersion"] = str(len(self.history) + 1)

    # ---- the API

    def get(self, path: str) -> dict[str, Any] | None:
        """The answer to GET; None where there is nothing."""
        with self._lock:
            if re.search(r"/rayclusters/[^/?]+$", path):
                return self.cluster
            if match := re.search(r"/pods/([^?]+)", path):
                return self._pods().get(match[1])
            if "/pods" in path:
                version = self.cluster["metadata"]["resourceVersion"]
                return {"metadata": {"resourceVersion": version}, "items": list(self._pods().values())}
        return None

    def patch(self, operations: list[dict[str, Any]]) -> dict[str, Any]:
        """A JSON patch of the RayCluster."""
        with self._lock:
            for operation in operations:
                *parents, last = operation["path"].strip("/").split("/")
                target: Any = self.cluster
                for key in parents:
                    target = target[int(key)] if isinstance(target, list) else target.setdefault(key, {})
                target[last] = operation.get("value")
            return self.cluster

    def _pods(self) -> dict[str, dict[str, Any]]:
        found = {HEAD_POD: self._pod(HEAD_POD, "headgroup", "head")}
        for pod in self.pods.values():
            found[pod.name] = self._pod(pod.name, pod.group, "worker")
            if pod.ends_by is not None:
                found[pod.name]["metadata"]["deletionTimestamp"] = "now"
        return found

    def _pod(self, name: str, group: str, kind: str) -> dict[str, Any]:
        labels = {"ray.io/cluster": self.cluster["metadata"]["name"], "ray.io/node-type": kind, "ray.io/group": group}
        version = self.cluster["metadata"]["resourceVersion"]
        running = {"name": "ray", "state": {"running": {}}}
        return {
            "metadata": {"name": name, "resourceVersion": version, "labels": labels},
            "spec": {"containers": [{"name": "ray", "resources": {}}]},
            "status": {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [running]},
        }


def handler(kubernetes: Kubernetes) -> type[BaseHTTPRequestHandler]:
    """Answers requests out of `kubernetes`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            found = kubernetes.get(self.path)
            self._answer(404, {}) if found is None else self._answer(200, found)

        def do_PATCH(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, kubernetes.patch(json.loads(body)))

        def _answer(self, code: int, what: dict[str, Any]) -> None:
            body = json.dumps(what).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def certificate(folder: Path) -> tuple[Path, Path]:
    """Files with a certificate of 127.0.0.1 that vouches for itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    signed = builder.add_extension(here, critical=False).sign(key, hashes.SHA256())
    certificate, private = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.PrivateFormat.TraditionalOpenSSL
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, plain, serialization.NoEncryption()))
    return certificate, private
