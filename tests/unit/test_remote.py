"""What object stores do to a run: a server that stops, fails, cuts short or does not know exclusive uploads."""

import errno
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.config import conf

from app.run.remote import RemoteStore, StoreAway, patiently
from tests.s3 import BUCKET, S3Server


@pytest.fixture
def store(s3_location: str) -> RemoteStore:
    return RemoteStore(s3_location)


CALLS: dict[str, Callable[[RemoteStore], object]] = {
    "write": lambda store: store.write("a", b"2"),
    "create": lambda store: store.create("b", b"2"),
    "read": lambda store: store.read("a"),
    "sizes": lambda store: store.sizes(""),
    "exists": lambda store: store.exists("a"),
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_gone_is_an_os_error_and_nothing_else(call: str, store: RemoteStore, s3: S3Server) -> None:
    store.write("a", b"1")
    with s3.away(), pytest.raises(StoreAway) as failure:
        CALLS[call](store)
    assert isinstance(failure.value, OSError)
    assert "connect" in str(failure.value)
    assert store.read("a") == b"1"
    assert store.names("") == ["a"]


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_fails_is_an_os_error_and_nothing_else(call: str, store: RemoteStore, s3: S3Server) -> None:
    store.write("a", b"1")
    s3.failing = lambda _method, _path: True
    with pytest.raises(StoreAway):
        CALLS[call](store)
    s3.well()
    assert store.read("a") == b"1"
    assert store.names("") == ["a"]


def test_an_answer_that_is_cut_short_is_never_taken_for_the_whole(store: RemoteStore, s3: S3Server) -> None:
    store.write("a", b"x" * 100_000)
    s3.cutting = lambda method, _path: method == "GET"
    with pytest.raises(StoreAway):
        store.read("a")
    s3.well()
    assert store.read("a") == b"x" * 100_000


def test_what_waits_for_a_store_goes_on_when_it_is_back(store: RemoteStore, s3: S3Server) -> None:
    store.write("a", b"1")
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(patiently(lambda: store.read("a"))))
    with s3.away():
        waiting.start()
        with pytest.raises(StoreAway):
            patiently(lambda: store.read("a"), for_s=0.0)
        assert found == []
    waiting.join()
    assert found == [b"1"]


def test_patience_is_for_stores_that_are_away_alone(store: RemoteStore) -> None:
    with pytest.raises(FileNotFoundError):
        patiently(lambda: store.read("a"))


def test_a_missing_bucket_is_refused_and_not_made(s3: S3Server) -> None:
    store = RemoteStore("s3://no-such-bucket/run")
    for call in (CALLS["write"], CALLS["create"], CALLS["sizes"], store.__class__.check_exclusive):
        with pytest.raises(FileNotFoundError):
            call(store)
    s3.requests.clear()
    with pytest.raises(FileNotFoundError):
        store.write("a", b"")
    assert all(path.startswith("/no-such-bucket/run") for _, path in s3.requests)


def test_a_store_whose_uploads_are_not_exclusive_is_found_out(store: RemoteStore, s3: S3Server) -> None:
    store.check_exclusive()
    assert store.names("") == []
    s3.careless = True
    with pytest.raises(OSError, match="not safe") as refusal:
        store.check_exclusive()
    assert refusal.value.errno == errno.ENOTSUP
    assert store.names("") == []


def test_a_create_is_one_request(store: RemoteStore, s3: S3Server) -> None:
    """The journal makes one for each merge."""
    store.create("a", b"1")
    s3.requests.clear()
    store.create("b", b"1")
    assert [method for method, _ in s3.requests] == ["PUT"]


def test_a_store_travels_and_is_used_after_a_fork(store: RemoteStore) -> None:
    store.write("a", b"1")
    assert pickle.loads(pickle.dumps(store)).read("a") == b"1"
    child = multiprocessing.get_context("fork").Process(target=store.write, args=("b", b"2"))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert store.read("b") == b"2"


OTHER = """
import sys
from app.run.storage import open_store
print(open_store(sys.argv[1]).read("a").decode())
"""


def test_another_process_finds_it_by_its_environment(store: RemoteStore, s3_location: str, s3: S3Server) -> None:
    store.write("a", b"hello")
    root = Path(__file__).parents[2]
    env = {**s3.env, "PYTHONPATH": str(root), "PATH": ""}
    other = subprocess.run([sys.executable, "-c", OTHER, s3_location], env=env, capture_output=True, text=True)
    assert (other.returncode, other.stdout) == (0, "hello\n"), other.stderr


def test_fsspecs_own_settings_come_before_the_defaults(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conf, "s3", {"endpoint_url": s3.url, "config_kwargs": {"connect_timeout": 77}})
    store = RemoteStore(f"s3://{BUCKET}/settings")
    assert store._opened[1].config_kwargs == {"connect_timeout": 77}
    monkeypatch.setitem(conf, "s3", {"endpoint_url": s3.url})
    assert RemoteStore(f"s3://{BUCKET}/settings")._opened[1].config_kwargs["connect_timeout"] == 5
