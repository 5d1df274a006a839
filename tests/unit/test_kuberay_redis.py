"""The command of Redis in docker/kuberay, with a real `redis-server`: it asks for the password, and keeps its data."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.harness import wait_for
from tests.manifests import find, render
from tests.ports import free_port

PASSWORD = "of-this-test"
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server (Debian: redis-server)"),
]


def container() -> dict:
    (inside,) = find(render("kind/cluster"), "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"]
    return inside


def ask(port: int, *words: str, password: str = PASSWORD) -> str:
    """What `redis-cli` of the probes prints; REDISCLI_AUTH is what it logs in with."""
    (variable,) = [v for v in container()["env"] if v["name"] == "REDISCLI_AUTH"]
    assert variable["value"] == "$(REDIS_PASSWORD)"
    env = {"REDISCLI_AUTH": password, "PATH": "/usr/bin:/bin"}
    command = ["redis-cli", "-p", str(port), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    port = free_port()
    here = {"/data": str(folder), "$(REDIS_PASSWORD)": PASSWORD}
    words = [here.get(word, word) for word in container()["args"]]
    server = subprocess.Popen([*words, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        probe_words = container()["readinessProbe"]["exec"]["command"][1:]
        wait_for("the readiness probe passes", lambda: ask(port, *probe_words) == "PONG", 30.0)
        yield port
    finally:
        server.kill()  # as a node that is lost
        server.wait()


def test_what_was_written_a_second_ago_outlives_a_kill(tmp_path: Path) -> None:
    with serving(tmp_path) as port:
        assert ask(port, "SET", "head", "here") == "OK"
        assert ask(port, "PING", password="another") != "PONG"
        assert "NOAUTH" in ask(port, "GET", "head", password="")
        wait_for("it is on the disk", lambda: b"here" in b"".join(p.read_bytes() for p in tmp_path.rglob("*.aof")))
    with serving(tmp_path) as port:
        assert ask(port, "GET", "head") == "here"
