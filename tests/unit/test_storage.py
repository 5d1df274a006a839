"""Blobs are whole and durable or not there, on a local disk, on fsspec and on a disk that is full."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from app.run.storage import LocalStore, RemoteStore, Store, open_store, remove_partials


@pytest.fixture(params=["local", "file-url", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield open_store(str(tmp_path / "new" / "folder"))
    elif request.param == "file-url":
        yield open_store(f"file://{tmp_path}/with%20space")
    else:
        yield open_store("memory://bucket/run")
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_open_store_picks_the_kind(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    assert isinstance(open_store("memory://x"), RemoteStore)


def test_write_read_replace_delete(store: Store) -> None:
    store.write("a/one", b"1")
    store.write("a/one", b"2")
    assert store.exists("a/one")
    assert store.read("a/one") == b"2"
    store.delete("a/one")
    store.delete("a/one")
    assert not store.exists("a/one")
    with pytest.raises(FileNotFoundError):
        store.read("a/one")


def test_create_refuses_a_taken_name_and_keeps_what_is_there(store: Store) -> None:
    store.create("a/one", b"first")
    with pytest.raises(FileExistsError):
        store.create("a/one", b"second")
    assert store.read("a/one") == b"first"
    assert store.names("") == ["a/one"]


def test_names_are_sorted_and_filtered(store: Store) -> None:
    assert store.names("journal/") == []
    for name in ("journal/2", "journal/10", "snapshot-1", "journal/1", "other/journal/3"):
        store.write(name, b"")
    assert store.names("journal/") == ["journal/1", "journal/10", "journal/2"]
    assert store.names("snapshot-") == ["snapshot-1"]
    assert store.names("journal/1") == ["journal/1", "journal/10"]
    assert len(store.names("")) == 5


def test_leftovers_of_a_kill_are_not_listed(tmp_path: Path) -> None:
    """A writer killed inside its write leaves a temporary file: unseen, and the name can still be created."""
    child = multiprocessing.get_context("fork").Process(target=_die_before_the_link, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "journal").iterdir())) == 1
    store = LocalStore(tmp_path)
    assert store.names("") == []
    store.create("journal/1", b"whole")
    assert store.read("journal/1") == b"whole"

    (tmp_path / "journal" / ".mine.partial").touch()
    remove_partials(tmp_path)
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [".mine.partial", "1"]


def _die_before_the_link(root: Path) -> None:
    os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    LocalStore(root).create("journal/1", b"half")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount command")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk can't be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_everything_as_it_was(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    store.write("kept", b"k" * 100_000)
    with pytest.raises(OSError) as failure:
        store.write("kept", b"x" * 300_000)
    assert failure.value.errno == errno.ENOSPC
    with pytest.raises(OSError):
        store.create("new", b"x" * 300_000)
    assert store.read("kept") == b"k" * 100_000
    assert [path.name for path in small_disk.iterdir()] == ["kept"]
    store.write("new", b"n" * 50_000)
    assert store.read("new") == b"n" * 50_000


def test_a_file_size_limit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """The same without root: the kernel refuses to let files grow."""
    child = multiprocessing.get_context("fork").Process(target=_write_under_a_limit, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert LocalStore(tmp_path).names("") == ["kept"]
    assert LocalStore(tmp_path).read("kept") == b"k" * 1000


def _write_under_a_limit(root: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    store = LocalStore(root)
    store.write("kept", b"k" * 1000)
    with pytest.raises(OSError):
        store.write("kept", b"x" * 20_000)
    with pytest.raises(OSError):
        store.create("new", b"x" * 20_000)
