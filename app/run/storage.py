"""Durable, atomic storage of small named blobs under one folder: a local path or any fsspec URL.

What `write` and `create` put down is complete and durable when they return, and never seen half written. Names
are relative, with forward slashes. `OSError` passes through: callers decide what a full or lost disk means.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from typing_extensions import override

MOST_TEXT_BYTES = 2**24
"""Of what is read as one text; our own have a few kilobytes."""
_TEMPORARY = ".partial"
_OWN = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(_TEMPORARY)}")


class Store(ABC):
    """Named blobs under one folder."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Put `data` at `name`, replacing what is there. All or nothing; durable on return."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Like `write`, for a name that must be new.

        Raises:
            FileExistsError: the name is taken. Of two writers at once, one gets this.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The bytes at `name`.

        Raises:
            FileNotFoundError: nothing is there.
        """

    @abstractmethod
    def names(self, prefix: str) -> list[str]:
        """All names that start with `prefix`, sorted. Half-written leftovers of a kill are not among them."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove `name`; nothing happens when it isn't there."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Is there something at `name`?"""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes at `name`.

        Raises:
            FileNotFoundError: nothing is there.
        """

    def text(self, name: str) -> str:
        """A small text at `name`.

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: it is too large, or not UTF-8.
        """
        if (size := self.size(name)) > MOST_TEXT_BYTES:
            raise ValueError(f"it has {size:,} bytes, at most {MOST_TEXT_BYTES:,} are possible")
        return self.read(name).decode()


def open_store(location: str) -> Store:
    """The store at a local path, a `file://` URL or any other fsspec URL. Writing makes the folder."""
    url = urlsplit(location)
    if "://" not in location:
        return LocalStore(Path(location))
    if url.scheme == "file":
        return LocalStore(Path(unquote(url.path)))
    return RemoteStore(location)


def remove_partials(folder: Path) -> None:
    """Remove what writers that were killed have left half written under a local folder. Nobody may be writing there."""
    for path in folder.rglob(f".*{_TEMPORARY}"):
        if _OWN.fullmatch(path.name):
            path.unlink(missing_ok=True)


class LocalStore(Store):
    """A folder of this machine: temporary file, fsync, rename (or link), fsync of the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @override
    def write(self, name: str, data: bytes) -> None:
        target = self.root / name
        temporary = _write_temporary(target, data)
        try:
            os.replace(temporary, target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _fsync_folder(target.parent)

    @override
    def create(self, name: str, data: bytes) -> None:
        target = self.root / name
        temporary = _write_temporary(target, data)
        try:
            os.link(temporary, target)  # unlike a rename, fails when the name is taken
        finally:
            temporary.unlink(missing_ok=True)
        try:
            _fsync_folder(target.parent)
        except OSError:
            with suppress(OSError):
                target.unlink()  # not known to be durable: the caller must be able to try the name again
            raise

    @override
    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    @override
    def names(self, prefix: str) -> list[str]:
        folder = self.root / PurePosixPath(prefix + "x").parent  # no need to walk what can't match
        found = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(_TEMPORARY))
        relative = (path.relative_to(self.root).as_posix() for path in found)
        return sorted(name for name in relative if name.startswith(prefix))

    @override
    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @override
    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    @override
    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size


class RemoteStore(Store):
    """A folder of an fsspec file system, for object stores whose single uploads are atomic and durable."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._fs: Any
        self._fs, root = url_to_fs(url)
        self._root = str(root).rstrip("/")
        self._folders: set[str] = set()

    @override
    def write(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name, make_folder=True), data)

    @override
    def create(self, name: str, data: bytes) -> None:
        path = self._path(name, make_folder=True)
        # File systems without an exclusive upload ignore the mode, so look first as well.
        if self._fs.exists(path):
            raise FileExistsError(path)
        self._fs.pipe_file(path, data, mode="create")

    @override
    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(name)))

    @override
    def names(self, prefix: str) -> list[str]:
        self._fs.invalidate_cache()
        start = len(self._root) + 1
        found = self._fs.find(str(PurePosixPath(self._path(prefix + "x")).parent))
        return sorted(path[start:] for path in found if path[start:].startswith(prefix))

    @override
    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    @override
    def exists(self, name: str) -> bool:
        return bool(self._fs.isfile(self._path(name)))

    @override
    def size(self, name: str) -> int:
        return int(self._fs.size(self._path(name)))

    def _path(self, name: str, *, make_folder: bool = False) -> str:
        path = f"{self._root}/{name}"
        folder = path.rpartition("/")[0]
        if make_folder and folder not in self._folders:
            self._fs.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path


def _write_temporary(target: Path, data: bytes) -> Path:
    """Data in a new file beside `target`, on the disk; nothing is left when that fails."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file stands where the folder should be: not that `target` is taken
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target.parent)) from error
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}{_TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
