"""Durable, atomic storage of small named blobs under one folder: a local path or any fsspec URL.

What `write` and `create` put down is complete and durable when they return, and never seen half written. Names
are relative, with forward slashes. `OSError` passes through: callers decide what a full or lost disk means.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path, PurePosixPath
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
    def read(self, name: str, start: int = 0) -> bytes:
        """The bytes at `name`, from the byte `start` on, which must be there unless it is 0.

        Raises:
            FileNotFoundError: nothing is there.
        """

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """All names that start with `prefix`, sorted, with their bytes. Half-written leftovers of a kill are not among
        them."""

    def names(self, prefix: str) -> list[str]:
        """The names alone."""
        return list(self.sizes(prefix))

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

    @abstractmethod
    def put(self, name: str, path: Path) -> None:
        """Put a file of this machine at `name`, as `write` does. A remote store does not read it into memory first."""

    @abstractmethod
    def get(self, name: str, path: Path) -> None:
        """Put what is at `name` into a file of this machine, which may be left half written."""


def open_store(location: str) -> Store:
    """The store at a local path, a `file://` URL or any other fsspec URL. Writing makes the folder."""
    path = local_path(location)
    if path is not None:
        return LocalStore(path)
    from app.run.remote import RemoteStore

    return RemoteStore(location)


def local_path(location: str) -> Path | None:
    """The absolute path of a location on this machine's file system, None for any other URL."""
    if "://" not in location:
        return Path(location).expanduser().absolute()
    url = urlsplit(location)
    return Path(unquote(url.path)) if url.scheme == "file" else None


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
    def read(self, name: str, start: int = 0) -> bytes:
        with open(self.root / name, "rb") as file:
            file.seek(start)
            return file.read()

    @override
    def sizes(self, prefix: str) -> dict[str, int]:
        folder = self.root / PurePosixPath(prefix + "x").parent  # no need to walk what can't match
        found: dict[str, int] = {}
        for path in folder.rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if name.startswith(prefix) and not name.endswith(_TEMPORARY):
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    state = path.stat()
                    if stat.S_ISREG(state.st_mode):
                        found[name] = state.st_size
        return dict(sorted(found.items()))

    @override
    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @override
    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    @override
    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    @override
    def put(self, name: str, path: Path) -> None:
        self.write(name, path.read_bytes())

    @override
    def get(self, name: str, path: Path) -> None:
        path.write_bytes(self.read(name))


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
