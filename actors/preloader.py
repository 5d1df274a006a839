"""The process that workers are forked from: a fork of the driver, on a Ray of its own, else one for each node.

It imports what actors import, once, and forks for each request; a fork goes on as a Ray worker that has all that
already, and shares its memory. It starts no thread and touches no accelerator, so forks begin clean. It ends with its
owner (driver or raylet); a node's also when nobody needed it for a while.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.preload import CUDA_CHECK, DRIVERS, HEADER

WITHOUT_RAY = (
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "app.diloco.codecs.compiled",
    "app.learning.inner",
    "app.learning.evaluate",
    "app.learning.export",
)
WITH_RAY = ("ray", "ray._private.node", "actors.supervisor", "actors.worker")
"""Ray reads some of its settings from the environment when it is imported."""
IDLE_S = 60.0
"""How long a node's preloader waits for something to do."""
LEAVE_S = 5.0
"""Workers that outlive their owner for longer, as stopped ones do, are killed."""
REQUEST_S = 10.0


@dataclass(frozen=True)
class Task:
    """What a fork is to be."""

    arguments: list[str]
    """A script, and its arguments."""
    environment: dict[str, str]
    folder: str
    fds: list[int]
    """Its standard input, output and error."""


def main() -> None:
    """A node's preloader: `python -m actors.preloader SOCKET RAYLET_PID`."""
    path = sys.argv[1]
    task = Preloader(_listener(path), path, int(sys.argv[2]), IDLE_S).serve()
    if task is not None:
        become(task)


def fork_preloader() -> None:
    """Fork this process, which is about to start a Ray of its own, into its preloader: it has what was imported here.

    To be called before there are threads, and before Ray is imported. Ray's workers find it by an environment variable.
    """
    os.environ.setdefault(CUDA_CHECK, "1")
    importlib.import_module(WITHOUT_RAY[0])  # for both
    driver, folder = os.getpid(), tempfile.mkdtemp(prefix="diloco-")
    path = os.path.join(folder, "preload")
    listener = _listener(path)
    if os.fork():
        listener.close()
        os.environ[DRIVERS] = path
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return
    code = 1
    try:
        os.setsid()  # the terminal's Ctrl-C is not for it
        null, log = os.open(os.devnull, os.O_RDWR), os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT)
        _redirect([null, os.dup(null), log])
        task = Preloader(listener, path, driver, idle_s=None).serve()
        if task is None:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        become(task)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    # Not through the driver's frames, which wait above.
    atexit._run_exitfuncs()
    os._exit(code)


def _load(modules: tuple[str, ...]) -> None:
    gc.disable()  # while modules load it finds nothing, and takes a fifth of the time
    for module in modules:
        importlib.import_module(module)
    gc.freeze()


def _listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def become(task: Task) -> None:
    """Run the task's script as Python would have."""
    gc.enable()
    _redirect(task.fds)
    os.setpgid(0, 0)
    os.chdir(task.folder)
    os.environ.clear()
    os.environ.update(task.environment)
    sys.argv = task.arguments
    sys.path[0] = os.path.dirname(task.arguments[0])
    runpy.run_path(task.arguments[0], run_name="__main__")


def _redirect(fds: list[int]) -> None:
    """Make them standard input, output and error."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)


class Preloader:
    """Forks on request, and watches over owner, companions and forks."""

    def __init__(self, listener: socket.socket, path: str, owner: int, idle_s: float | None):
        """`idle_s`: without a worker and without a request for so long, it ends; None: never."""
        self._listener, self._path, self._idle_s = listener, path, idle_s
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, socket.socket] = {}
        """Process id → connection to its companion."""
        self._woken, wakes = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wakes, False)
        self._owner: int | None = None
        self._fds = [self._woken, wakes]
        self._own(self._woken, self._reap)
        self._own(listener.fileno(), self._accept)
        with suppress(ProcessLookupError):
            self._owner = os.pidfd_open(owner)
            self._fds.append(self._owner)
            self._own(self._owner, lambda: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)

    def _own(self, fd: int, then: Callable[[], Task | None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, then)

    def serve(self) -> Task | None:
        """Import, and fork on request. Returns in a fork, with what it is to be, and None when it is to end."""
        _load(WITHOUT_RAY)
        while self._owner is not None:
            ready = self._selector.select(self._idle_s)
            if not ready and not self._workers and self._retire():
                return None
            for key, _ in ready:
                if key.fd == self._owner:
                    self._owner = None
                elif (task := key.data()) is not None:
                    return task
        self._end_workers()
        return None

    def _retire(self) -> bool:
        """Stop listening, unless somebody is about to ask."""
        with open(f"{self._path}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            os.unlink(self._path)
            self._listener.close()
            return True

    def _end_workers(self) -> None:
        deadline = time.monotonic() + LEAVE_S
        while self._workers and (left := deadline - time.monotonic()) > 0:
            self._selector.select(left)
            self._reap()
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)

    def _accept(self) -> Task | None:
        connection, _ = self._listener.accept()
        connection.settimeout(REQUEST_S)
        try:
            task = _asked(connection)
        except (OSError, ValueError, KeyError) as error:
            print(f"not a request: {error!r}", file=sys.stderr)
            connection.close()
            return None
        if "ray" not in sys.modules:
            os.environ.update(task.environment)
            _load(WITH_RAY)
        pid = os.fork()
        if not pid:
            self._forget(connection)
            return task
        for fd in task.fds:
            os.close(fd)
        self._workers[pid] = connection
        self._own(connection.fileno(), lambda: self._companion_gone(pid))
        pidfd = os.pidfd_open(pid)
        with suppress(OSError):  # a companion that has gone is seen at the next turn
            socket.send_fds(connection, [b"+"], [pidfd])
        os.close(pidfd)
        return None

    def _forget(self, connection: socket.socket) -> None:
        """In a fork: nothing of the parent's stays open."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._listener, connection, *self._workers.values()):
            one.close()
        for fd in self._fds:
            os.close(fd)

    def _companion_gone(self, pid: int) -> None:
        """A worker goes with its companion: Ray has ended that one, or has never heard of the worker."""
        os.kill(pid, signal.SIGKILL)
        self._selector.unregister(self._workers[pid])

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                continue
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                connection = self._workers.pop(pid)
                with suppress(KeyError):
                    self._selector.unregister(connection)
                connection.close()


def _asked(connection: socket.socket) -> Task:
    """Read a request. Raises ValueError, KeyError or OSError for anything else."""
    header, fds, _, _ = socket.recv_fds(connection, HEADER.size, 3)
    if len(header) != HEADER.size or len(fds) != 3:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"{len(header)} bytes, {len(fds)} files")
    (left,) = HEADER.unpack(header)
    body = b""
    while left > len(body):
        part = connection.recv(left - len(body))
        if not part:
            raise ValueError("it breaks off")
        body += part
    request: dict[str, Any] = json.loads(body)
    return Task(request["arguments"], request["environment"], request["folder"], fds)


if __name__ == "__main__":
    main()
