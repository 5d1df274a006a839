"""Starts a Ray worker by forking a process that has imported everything: `python -m actors.preload worker.py ARG...`.

Importing torch and transformers takes most of an actor's start. Ray runs this in place of Python (the `py_executable`
of a runtime environment): it asks a preloader, the driver's or else the node's, which it starts when there is none, for
a fork that goes on as the worker. The two processes live and die together. Where anything is in the way, the worker
starts in the ordinary manner. Imports nothing that takes time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

SPAWN_S = 10.0
"""A preloader listens after this long at most; it imports later."""
POLL_S = 0.02
ANSWER_S = 30.0
"""A preloader that has not forked after this long, imports included, is not waited for; Ray gives a worker 60."""
TRIES = 3
"""A preloader may end between two questions."""
RAYLET = "RAY_RAYLET_PID"
"""Environment variable of every process that a raylet starts, directly or not."""
DRIVERS = "DILOCO_PRELOADER"
"""Environment variable with the socket of a preloader that the driver of this Ray has forked from itself."""
START_CPU = "DILOCO_START_CPU_S"
"""Environment variable with the CPU seconds that a forked worker has cost before its fork."""
CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch looks for GPUs without using them: a fork of a process that used one can't."""
OWN = ("RAY_CLIENT_MODE",)
SHARED = ("FSSPEC_", "HF_", "LD_", "MALLOC_", "NUMBA_", "PYTHON", "RAY_", "TORCH", "TRANSFORMERS_", "XDG_")
"""Prefixes of variables that imports look at: workers that differ in one do not share a preloader. RAY_JOB_ID is one:
Ray keeps the one that it was imported with, and has no use for a worker that comes under another job's."""
HEADER = struct.Struct("!I")
"""Length of the JSON that follows."""


class Unavailable(Exception):
    """No preloader can be had."""


def cpu_s() -> float:
    """CPU seconds that this process has cost, its start included."""
    return time.process_time() + float(os.environ.get(START_CPU, "0"))


def py_executable() -> str:
    """What Ray runs in place of Python, as its shell reads it: this interpreter, else the one of that node."""
    return f'"$(command -v {sys.executable} || command -v python3 || command -v python)" -m actors.preload'


def main() -> None:
    """Be the worker's companion, or the worker itself."""
    arguments = sys.argv[1:]
    try:
        pidfd = forked(arguments)
    except (Unavailable, OSError, ValueError) as error:
        print(f"not preloaded, {error}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: _pass_on(pidfd, received))
    accompany(pidfd)


def forked(arguments: list[str]) -> int:
    """A pidfd of a fork that goes on as the worker. Raises Unavailable or OSError."""
    path = os.environ.get(DRIVERS)
    if path is not None:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            if (pidfd := _asked(connection, arguments)) is not None:
                return pidfd
    raylet = os.environ.get(RAYLET, "")
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    session = os.path.join(options.get("--temp-dir", ""), options.get("--session-name", ""))
    if not raylet.isdecimal() or not os.path.isdir(os.path.join(session, "sockets")):
        raise Unavailable("this is no worker of a raylet")
    path = os.path.join(session, "sockets", f"preload-{_key(raylet)}")
    for _ in range(TRIES):
        with _connected(path, raylet) as connection:
            if (pidfd := _asked(connection, arguments)) is not None:
                return pidfd
    raise Unavailable("the preloader does not answer")


def _key(raylet: str) -> str:
    """What workers have in common that may share a preloader: node, interpreter, folder, variables, version of code."""
    here = Path(__file__).resolve().parents[1]
    code = [(str(f), f.stat().st_mtime_ns) for part in ("actors", "app") for f in sorted((here / part).rglob("*.py"))]
    shared = {k: v for k, v in os.environ.items() if k.startswith(SHARED) and k not in OWN}
    everything = [raylet, sys.executable, os.getcwd(), sorted(shared.items()), code]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16]


def _connected(path: str, raylet: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        connection.connect(path)
        return connection
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(OSError):
            connection.connect(path)
            return connection
        with suppress(FileNotFoundError):
            os.unlink(path)
        _spawn(path, raylet)
        deadline = time.monotonic() + SPAWN_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                connection.connect(path)
                return connection
            time.sleep(POLL_S)
    connection.close()
    raise Unavailable("the preloader does not start")


def _spawn(path: str, raylet: str) -> None:
    import subprocess

    environment = {**os.environ, CUDA_CHECK: "1"}
    log = os.path.join(os.path.dirname(os.path.dirname(path)), "logs", f"{os.path.basename(path)}.log")
    with open(log, "ab") as out:
        command = [sys.executable, "-m", "actors.preloader", path, raylet]
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def _asked(connection: socket.socket, arguments: list[str]) -> int | None:
    """A pidfd of the worker; None when the preloader has gone."""
    environment = {**os.environ, START_CPU: f"{time.process_time():.3f}"}
    request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    body = json.dumps(request).encode()
    connection.settimeout(ANSWER_S)
    try:
        socket.send_fds(connection, [HEADER.pack(len(body))], [0, 1, 2])
        connection.sendall(body)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    except ConnectionError:
        return None
    if not fds:
        return None
    connection.detach()  # open until this process ends: its end is the worker's
    return fds[0]


def _pass_on(pidfd: int, number: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def accompany(pidfd: int) -> None:
    """Return when the worker has ended."""
    import select

    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    waiting.poll()


if __name__ == "__main__":
    main()
