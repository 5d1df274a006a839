"""Whole folders in a store: complete or not there. `complete.json`, written last, names every file with a checksum."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.run.storage import Store

COMPLETE = "complete.json"


class NotWhole(OSError):
    """What the store has is not what its `complete.json` says."""


def is_complete(store: Store, name: str) -> bool:
    """Whether the store has a whole folder of this name."""
    return store.exists(f"{name}/{COMPLETE}")


def upload(folder: Path, store: Store, name: str) -> str:
    """Put a local folder into the store as `name`, replacing what is there, and return the digest of what it holds.

    Nothing is sent when the store has the same already. While files are sent, the store has no whole folder `name`.
    """
    body = _described(folder)
    if not is_complete(store, name) or store.read(f"{name}/{COMPLETE}") != body:
        store.delete(f"{name}/{COMPLETE}")
        files = _files(folder)
        for file in files:
            store.put(f"{name}/{file}", folder / file)
        for other in store.names(f"{name}/"):
            if other.removeprefix(f"{name}/") not in files:
                store.delete(other)
        store.write(f"{name}/{COMPLETE}", body)
    (folder / COMPLETE).write_bytes(body)
    return _digest(body)


def download(store: Store, name: str, folder: Path, digest: str | None = None) -> str:
    """Have the store's folder `name` as a local one, and return its digest. One process of this machine does it.

    Nothing is asked of the store when the local one has the digest that is given.

    Raises:
        FileNotFoundError: the store has no whole folder of that name.
        NotWhole: its files are not what its list says, or it has another digest.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        here = _local(folder)
        if here is not None and _digest(here) == digest:
            return _digest(here)
        body = store.read(f"{name}/{COMPLETE}")
        if digest not in (None, _digest(body)):
            raise NotWhole(errno.EIO, "it was replaced by another", name)
        if here != body:
            _fetch(store, name, folder, body)
        return _digest(body)


def _fetch(store: Store, name: str, folder: Path, body: bytes) -> None:
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for file, facts in json.loads(body)["files"].items():
        target = fresh / file
        if not target.resolve().is_relative_to(fresh.resolve()):
            raise NotWhole(errno.EINVAL, "a file outside of its folder is listed", file)
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get(f"{name}/{file}", target)
        if _facts(target) != facts:
            raise NotWhole(errno.EIO, "its checksum is another than the one listed", f"{name}/{file}")
    (fresh / COMPLETE).write_bytes(body)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of the processes of this machine that want the folder, one at a time."""
    lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _local(folder: Path) -> bytes | None:
    try:
        return (folder / COMPLETE).read_bytes()
    except FileNotFoundError:
        return None


def _described(folder: Path) -> bytes:
    """The list of a folder's files; equal for equal folders."""
    files = {file: _facts(folder / file) for file in _files(folder)}
    return json.dumps({"files": files}, indent=1, sort_keys=True).encode()


def _files(folder: Path) -> list[str]:
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != COMPLETE)


def _facts(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
