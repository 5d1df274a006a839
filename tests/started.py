"""Ray's processes as `ray start --block` makes them, each with a folder of its own, ended with their test."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from below import below
from tests.cluster.harness import wait_for
from tests.ports import free_port

RAY = str(Path(sys.executable).with_name("ray"))
STORE = 100 * 1024 * 1024
END_S = 60.0


class Started:
    """A cluster of one machine, by commands. No tokens: pytest has none."""

    def __init__(self, folder: Path):
        """`folder` gets the logs."""
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._short = Path(f"/tmp/dl{self.port}")  # socket paths must be short
        self._short.mkdir()
        self._made: list[psutil.Process] = []

    def run(self, name: str, arguments: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """`ray ARGUMENTS` in the background."""
        with (self.folder / f"{name}.log").open("w") as log:
            environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **(env or {})}
            process = subprocess.Popen([RAY, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._made.append(psutil.Process(process.pid))
        return process

    def head(self, name: str, cpus: int, *more: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """The head, once it is up."""
        where = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--num-cpus={cpus}"]
        head = self.run(name, ["start", "--block", *where, *self._apart(name), *more], env)
        wait_for("the head is up", lambda: "started" in (self.folder / f"{name}.log").read_text())
        return head

    def node(
        self, name: str, cpus: int, labels: Mapping[str, str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Another node."""
        ports = ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        kind = [f"--num-cpus={cpus}", "--labels", ",".join(f"{key}={value}" for key, value in labels.items())]
        where = ["start", "--block", f"--address={self.address}", *kind, *ports, *self._apart(name)]
        return self.run(name, where, env)

    def _apart(self, name: str) -> list[str]:
        return [f"--temp-dir={self._short}/{name}", f"--object-store-memory={STORE}"]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL of a node: all its processes at once."""
        family = [*below(process.pid), psutil.Process(process.pid)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(END_S)

    def close(self) -> None:
        """End all of them."""
        living = [process for process in self._made if process.is_running()]
        family = [child for process in living for child in below(process.pid)]
        for process in reversed(living):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(living, END_S)
        for process in (*living, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._short, ignore_errors=True)
