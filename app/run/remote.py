"""Blobs in an object store, or in any other file system that fsspec knows by a URL."""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from typing_extensions import override

from app.run.storage import Store

T = TypeVar("T")
_log = logging.getLogger(__name__)

FLAT = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss")
"""Schemes of stores without folders. Nothing is made there but objects, a missing bucket least of all."""
S3_OPTIONS: dict[str, Any] = {
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 10,
        "retries": {"mode": "standard", "total_max_attempts": 2},
    }
}
"""For S3 unless fsspec's configuration has its own: an unreachable store is reported within seconds, not minutes."""
RETRY_S = 1.0
"""Seconds between two tries of what waits for a store to come back."""
_TELLING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that say something about a name; all others are the store's."""


class StoreAway(OSError):
    """The store can't be reached or failed: nothing is known of what was asked, and the same may be asked again."""


def patiently(call: Callable[[], T], for_s: float = float("inf")) -> T:
    """What `call` returns, tried again while its store is away; after `for_s` seconds StoreAway is raised."""
    end = time.monotonic() + for_s
    while True:
        try:
            return call()
        except StoreAway as error:
            if time.monotonic() > end:
                raise
            _log.warning("waiting for the store: %s", error)
            time.sleep(RETRY_S)


class RemoteStore(Store):
    """A folder of an fsspec file system.

    Relies on what object stores give: an upload is seen whole or not at all, is durable when it is answered, and is
    seen by every later read and listing. `create` relies on uploads that fail when the name is taken (S3:
    If-None-Match); `check_exclusive` finds out whether the store has them. An upload whose answer was lost may be sent
    twice by the client below, so `create` may say FileExistsError of its own bytes: callers compare what is there.

    Errors of the clients below that are no OSErrors come out as StoreAway. Travels to other processes as its URL.
    """

    def __init__(self, url: str) -> None:
        """Opens no connection yet.

        Raises:
            ValueError: fsspec does not know such a URL, or it names nothing.
            ImportError: a package that it needs is not installed; the message names it.
        """
        self._url = url
        self._opened: tuple[int, Any] = (0, None)
        self._root = self._open()
        if not self._root:
            raise ValueError("the URL names no bucket or folder")
        self._flat = url.partition("://")[0] in FLAT
        self._folders: set[str] = set()

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str]]:
        return RemoteStore, (self._url,)

    @override
    def write(self, name: str, data: bytes) -> None:
        self._do("pipe_file", self._path(name, make_folder=True), data)

    @override
    def create(self, name: str, data: bytes) -> None:
        path = self._path(name, make_folder=True)
        try:
            self._do("pipe_file", path, data, mode="create")
        except StoreAway as error:
            # How a server says that the name is taken differs, and so does what clients make of it.
            if error.errno == errno.EINVAL and self.exists(name):
                raise FileExistsError(path) from error
            raise

    @override
    def read(self, name: str, start: int = 0) -> bytes:
        limits = {"start": start} if start else {}
        return bytes(self._do("cat_file", self._path(name), **limits))

    @override
    def sizes(self, prefix: str) -> dict[str, int]:
        begin = len(self._root) + 1
        folder = str(PurePosixPath(self._path(prefix + "x")).parent)
        try:
            found = self._do("find", folder, detail=True)
        except FileNotFoundError:
            if self._flat:  # empty folders are found there, missing buckets are not
                raise
            return {}
        sizes = {path[begin:]: int(entry["size"]) for path, entry in found.items()}
        return {name: size for name, size in sorted(sizes.items()) if name.startswith(prefix)}

    @override
    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._do("rm_file", self._path(name))

    @override
    def exists(self, name: str) -> bool:
        try:
            return bool(self._do("info", self._path(name))["type"] == "file")
        except FileNotFoundError:
            return False

    @override
    def size(self, name: str) -> int:
        return int(self._do("info", self._path(name))["size"])

    @override
    def put(self, name: str, path: Path) -> None:
        self._do("put_file", str(path), self._path(name, make_folder=True))

    @override
    def get(self, name: str, path: Path) -> None:
        self._do("get_file", self._path(name), str(path))

    def check_exclusive(self) -> None:
        """Find out whether a second writer of a name is refused. What it writes is removed again.

        Raises:
            OSError: it is not, or the store can't be used.
        """
        name = f"probe-{uuid.uuid4().hex}"
        self.write(name, b"first")
        try:
            self.create(name, b"second")
        except FileExistsError:
            return
        finally:
            self.delete(name)
        raise OSError(errno.ENOTSUP, "the store lets two writers create one name: a journal is not safe there")

    def _do(self, method: str, *args: Any, **options: Any) -> Any:
        if self._opened[0] != os.getpid():  # its threads have stayed behind in the process that forked this one
            self._open()
        try:
            return getattr(self._opened[1], method)(*args, **options)
        except _TELLING:
            raise
        except Exception as error:  # each client has kinds of its own
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            raise StoreAway(number, f"{type(error).__name__}: {error}", str(args[0])) from error

    def _open(self) -> str:
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        scheme = self._url.partition("://")[0]
        own = S3_OPTIONS if scheme in ("s3", "s3a") else {}
        options = {key: value for key, value in own.items() if key not in conf.get("s3", {})}
        fs, root = url_to_fs(self._url, use_listings_cache=False, **options)  # others write there too
        self._opened = (os.getpid(), fs)
        return str(root).rstrip("/")

    def _path(self, name: str, *, make_folder: bool = False) -> str:
        path = f"{self._root}/{name}"
        folder = path.rpartition("/")[0]
        if make_folder and not self._flat and folder not in self._folders:
            self._do("makedirs", folder, exist_ok=True)
            self._folders.add(folder)
        return path
