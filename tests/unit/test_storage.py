"""Blobs are whole and durable or not there, on a local disk, on fsspec and on a disk that is full."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from app.run.remote import RemoteStore
from app.run.storage import LocalStore, Store, open_store, remove_partials


@pytest.fixture
def store(location: str) -> Store:
    return open_store(location)


def test_open_store_picks_the_kind(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    url = open_store(f"file://{tmp_path}/with%20space")
    assert isinstance(url, LocalStore)
    assert url.root == tmp_path / "with space"
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


def test_sizes_follow_what_is_written(store: Store) -> None:
    assert store.sizes("") == {}
    store.write("a/one", b"1")
    store.write("a/two", b"22")
    assert store.sizes("a/") == {"a/one": 1, "a/two": 2}
    store.write("a/one", b"111")
    assert store.sizes("a/") == {"a/one": 3, "a/two": 2}


def test_a_name_is_read_from_a_byte_on(store: Store) -> None:
    store.write("a", b"0123456789")
    assert [store.read("a", start) for start in (0, 1, 9)] == [b"0123456789", b"123456789", b"9"]


def test_files_go_in_and_come_out(store: Store, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    (tmp_path / "in").write_bytes(data)
    store.put("folder/file", tmp_path / "in")
    assert store.read("folder/file") == data
    store.get("folder/file", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    with pytest.raises(FileNotFoundError):
        store.get("folder/other", tmp_path / "out")


def test_a_folder_is_not_a_blob(store: Store) -> None:
    store.write("a/b/c", b"1")
    assert not store.exists("a/b")
    assert not store.exists("a/b/d")


def test_another_store_of_the_same_place_sees_it_at_once(location: str) -> None:
    one, two = open_store(location), open_store(location)
    assert two.names("") == []
    assert not two.exists("a")
    one.write("a", b"1")
    assert two.exists("a")
    assert two.names("") == ["a"]
    one.delete("a")
    assert not two.exists("a")
    assert two.names("") == []


def test_of_many_that_create_a_name_one_does(busy_location: str) -> None:
    """Each with a store of its own, all at once."""
    made: list[int] = []
    start = threading.Barrier(8)

    def create(i: int) -> None:
        store = open_store(busy_location)
        start.wait()
        with suppress(FileExistsError):
            store.create("taken", bytes([i]))
            made.append(i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert open_store(busy_location).read("taken") == bytes(made)


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
