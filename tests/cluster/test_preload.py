"""Actors are forked from a process that has imported everything: it may fail in any way, they start."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from actors.preload import py_executable
from below import gone, raylet_of
from tests.cluster.harness import wait_for
from tests.probe import Probe

pytestmark = pytest.mark.timeout(120)
CALL_S = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def probe(cluster):
    """Starts an actor that Ray restarts."""
    started = []

    def start(executable=None):
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        runtime_env = {"py_executable": executable or py_executable()}
        started.append(ray.remote(Probe).options(**options, runtime_env=runtime_env).remote())
        return started[-1]

    yield start
    for each in started:
        ray.kill(each)


def facts(actor):
    return ray.get(actor.facts.remote(), timeout=CALL_S)


def preloader_of(actor):
    pid, parent, imported = facts(actor)
    assert imported
    process = psutil.Process(parent)
    assert "actors.preloader" in process.cmdline()
    assert raylet_of(process) == raylet_of(psutil.Process(pid))
    return process


def companion_of(pid):
    """The process that Ray started, which was answered with a file of this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # of others, which may just be ending
            if "actors.preload" in " ".join(process.cmdline()):
                for info in Path(f"/proc/{process.pid}/fdinfo").iterdir():
                    if f"Pid:\t{pid}\n" in info.read_text():
                        return process
    raise AssertionError(f"{pid} has no companion")


def after(actor, old, what):
    """The facts of the actor's next process."""
    return wait_for(what, lambda: (new := facts(actor))[0] != old and new)


def test_actors_of_a_node_are_forks_of_one_process(probe):
    one, other = probe(), probe()
    assert preloader_of(one) == preloader_of(other)
    assert facts(one)[0] != facts(other)[0]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_fork_is_made_anew(probe, stopped):
    actor = probe()
    preloader, (pid, _, _) = preloader_of(actor), facts(actor)
    companion = companion_of(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert after(actor, pid, "a new process")[1] == preloader.pid
    wait_for("the companion is gone", lambda: gone(companion))


def test_a_fork_goes_with_the_process_that_ray_started(probe):
    actor = probe()
    pid = facts(actor)[0]
    companion_of(pid).kill()
    after(actor, pid, "a new process")
    wait_for("the fork is gone", lambda: not psutil.pid_exists(pid))


def test_a_preloader_that_dies_takes_nobody_along_and_is_replaced(probe):
    actor = probe()
    preloader, (pid, _, _) = preloader_of(actor), facts(actor)
    preloader.kill()
    wait_for("the preloader is gone", lambda: gone(preloader))
    assert facts(actor)[0] == pid
    assert preloader_of(probe()) != preloader
    os.kill(pid, signal.SIGKILL)
    assert after(actor, pid, "a new process")[1] not in (preloader.pid, pid)


OTHER = """
import sys, ray
from actors.preload import py_executable
from tests.probe import Probe
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
options = {"num_cpus": 0, "runtime_env": {"py_executable": py_executable()}}
pid, parent, imported = ray.get(ray.remote(Probe).options(**options).remote().facts.remote(), timeout=40)
print("preloader", parent if imported else None)
"""


def test_another_job_of_the_same_code_has_a_preloader_of_its_own(probe):
    first = preloader_of(probe())
    address = ray.get_runtime_context().gcs_address
    other = subprocess.run([sys.executable, "-c", OTHER, address], cwd=ROOT, capture_output=True, text=True)
    assert other.returncode == 0, other.stderr
    parent = other.stdout.split("preloader ")[1].strip()
    assert parent.isdecimal()
    assert int(parent) != first.pid


def test_garbage_is_not_a_request(probe):
    preloader = preloader_of(probe())
    path = preloader.cmdline()[-2]
    for garbage in (b"", b"x", b"\xff\xff\xff\xff", b"\0\0\0\2{}"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert preloader_of(probe()) == preloader


def test_where_no_preloader_starts_a_worker_starts_as_usual(probe, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('broken')")
    actor = probe(f'env PYTHONPATH="{tmp_path}" {py_executable()}')
    _, parent, imported = facts(actor)
    assert not imported
    assert "raylet" in psutil.Process(parent).name()


@pytest.mark.slow
def test_a_preloader_that_hangs_is_not_waited_for(probe):
    preloader = preloader_of(probe())
    preloader.suspend()
    try:
        assert not facts(probe())[2]
    finally:
        preloader.resume()
