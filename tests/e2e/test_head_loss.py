"""The head of a cluster is lost. With its state kept in Redis the run goes on, without that it is resumed."""

import contextlib
import shutil
import subprocess

import pytest

from tests.cluster.harness import wait_for
from tests.ports import free_port
from tests.started import Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

KEYS = (
    "run.shared_dir=true",
    "run.resume=auto",
    "train.tokens=1000000000",
    "syncer.label_selector={for: services}",
    "pools.local.label_selector={for: learners}",
)
GIVE_UP_S = "300"
"""Nodes wait for a head for so long; then they end."""


@pytest.fixture
def redis(tmp_path):
    port = free_port()
    with (tmp_path / "redis.log").open("w") as log:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    wait_for("redis is up", lambda: "Ready to accept connections" in (tmp_path / "redis.log").read_text())
    yield f"127.0.0.1:{port}"
    server.terminate()
    server.wait(30)


@pytest.fixture
def started(tmp_path):
    cluster = Started(tmp_path)
    yield cluster
    cluster.close()


def nodes(started, env):
    """One for the services, and one for learners."""
    for kind in ("services", "learners"):
        started.node(kind, 1, {"for": kind}, env)


def newest(run, learner):
    """(incarnation, steps) of the newest sample of a learner; None before there is one."""
    samples = [event for event in run.events("learner") if event["learner"] == learner]
    return samples and (samples[-1]["incarnation"], samples[-1]["steps"])


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not there (Debian has it)")
def test_with_a_head_that_keeps_its_state_learners_step_on_and_the_run_goes_on(started, redis, command):
    kept = {
        "RAY_REDIS_ADDRESS": redis,
        "RAY_external_storage_namespace": "run",
        "RAY_gcs_rpc_server_reconnect_timeout_s": GIVE_UP_S,
    }
    head = started.head("head", 0, env=kept)
    nodes(started, kept)
    env = {"RAY_ADDRESS": started.address, "RAY_AUTH_MODE": "disabled"}
    run = command(*KEYS, env=env)
    run.wait_merges(20)
    learners = ("learner-0", "learner-1")
    before = {name: wait_for(f"{name} steps", lambda name=name: newest(run, name)) for name in learners}

    started.kill(head)
    merges = len(run.events("merge"))
    wait_for("merges go on without a head", lambda: len(run.events("merge")) > merges + 40)
    with contextlib.suppress(AssertionError):
        run.wait(5.0)  # the driver may have gone with the head
    started.head("head-again", 0, env=kept)
    again = command(*KEYS, folder=run.folder, env=env)
    wait_for("the same command finds the run alive", lambda: "attached to the living run" in again.output)
    merges = len(run.events("merge"))
    wait_for("merges go on", lambda: len(run.events("merge")) > merges + 40)
    for name in learners:
        incarnation, steps = newest(run, name)
        assert incarnation == before[name][0]
        assert steps > before[name][1]
    again.process.terminate()
    assert again.wait() == 143
    work = again.summary()["work"]
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())


def test_without_it_the_same_command_resumes(started, command, tmp_path):
    cluster = [started.head("head", 0)]
    nodes(started, {})
    env = {"RAY_ADDRESS": started.address, "RAY_AUTH_MODE": "disabled"}
    run = command(*KEYS, env=env)
    run.wait_merges(20)
    for node in cluster:
        started.kill(node)
    assert run.wait() != 0
    merges = len(run.events("merge"))
    started.close()  # what is left of it gives up by itself, in a minute
    other = Started(tmp_path)
    try:
        other.head("head-2", 0)
        nodes(other, {})
        again = command(*KEYS, folder=run.folder, env=env | {"RAY_ADDRESS": other.address})
        wait_for("it goes on from the journal", lambda: len(run.events("merge")) > merges + 20)
        again.process.terminate()
        assert again.wait() == 143
    finally:
        other.close()
