"""Folders in a store are whole or not there."""

import json
from pathlib import Path

import pytest

from app.config import ModelConfig
from app.learning import tokenizer
from app.learning.export import export
from app.learning.model import build_model
from app.run.mirror import COMPLETE, NotWhole, download, is_complete, upload
from app.run.remote import StoreAway
from app.run.storage import open_store
from tests.s3 import S3Server

FILES = {"config.json": b"{}", "weights/part-1": b"1" * 5000, "weights/part-2": b"2" * 5000}


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def files_of(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != COMPLETE
    }


def test_a_folder_arrives_as_it_was(location: str, tmp_path: Path) -> None:
    store = open_store(location)
    assert not is_complete(store, "model")
    with pytest.raises(FileNotFoundError):
        download(store, "model", tmp_path / "nothing")
    digest = upload(folder_of(tmp_path / "from", FILES), store, "model")
    assert is_complete(store, "model")
    assert download(store, "model", tmp_path / "to") == digest
    assert files_of(tmp_path / "to") == FILES
    assert upload(tmp_path / "to", store, "model") == digest


def test_another_folder_replaces_it_whole(location: str, tmp_path: Path) -> None:
    store = open_store(location)
    upload(folder_of(tmp_path / "one", FILES), store, "model")
    download(store, "model", tmp_path / "to")
    other = {"config.json": b"{1}", "weights/part-1": b"1" * 5000}
    upload(folder_of(tmp_path / "two", other), store, "model")
    assert sorted(store.names("model/")) == ["model/complete.json", "model/config.json", "model/weights/part-1"]
    download(store, "model", tmp_path / "to")
    assert files_of(tmp_path / "to") == other


def test_an_upload_that_breaks_off_leaves_no_folder_and_can_be_made_again(
    s3_location: str, s3: S3Server, tmp_path: Path
) -> None:
    store = open_store(s3_location)
    upload(folder_of(tmp_path / "one", FILES), store, "model")
    other = {**FILES, "config.json": b"{1}"}
    folder_of(tmp_path / "two", other)
    s3.failing = lambda method, path: method == "PUT" and path.endswith("part-2")
    with pytest.raises(StoreAway):
        upload(tmp_path / "two", store, "model")
    s3.well()
    assert not is_complete(store, "model")
    with pytest.raises(FileNotFoundError):
        download(store, "model", tmp_path / "to")
    upload(tmp_path / "two", store, "model")
    download(store, "model", tmp_path / "to")
    assert files_of(tmp_path / "to") == other


def test_nothing_is_sent_or_fetched_twice(s3_location: str, s3: S3Server, tmp_path: Path) -> None:
    store = open_store(s3_location)
    digest = upload(folder_of(tmp_path / "from", FILES), store, "data")
    s3.requests.clear()
    upload(tmp_path / "from", store, "data")
    assert not [path for method, path in s3.requests if method == "PUT"]
    download(store, "data", tmp_path / "to")
    s3.requests.clear()
    download(store, "data", tmp_path / "to", digest)
    assert s3.requests == []
    with s3.away():
        assert download(store, "data", tmp_path / "from", digest) == digest  # whoever sent it has it


@pytest.mark.parametrize("damage", [b"1" * 4999, b"1" * 4999 + b"0", b""])
def test_files_that_are_not_as_listed_are_refused(damage: bytes, location: str, tmp_path: Path) -> None:
    store = open_store(location)
    digest = upload(folder_of(tmp_path / "from", FILES), store, "data")
    store.write("data/weights/part-1", damage)
    with pytest.raises(NotWhole, match="part-1"):
        download(store, "data", tmp_path / "to", digest)
    assert not (tmp_path / "to").exists()


def test_what_was_replaced_by_another_is_refused(location: str, tmp_path: Path) -> None:
    store = open_store(location)
    digest = upload(folder_of(tmp_path / "one", FILES), store, "data")
    upload(folder_of(tmp_path / "two", {"config.json": b"other"}), store, "data")
    with pytest.raises(NotWhole, match="replaced"):
        download(store, "data", tmp_path / "to", digest)


def test_a_list_cannot_reach_outside_of_the_folder(location: str, tmp_path: Path) -> None:
    store = open_store(location)
    store.write("outside", b"x")
    facts = {"bytes": 1, "sha256": "0"}
    store.write(f"data/{COMPLETE}", json.dumps({"files": {"../../outside": facts}}).encode())
    with pytest.raises(NotWhole, match="outside"):
        download(store, "data", tmp_path / "a" / "to")
    assert not (tmp_path / "outside").exists()


def test_a_model_loads_after_the_trip(location: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = tokenizer.build("bytes", [], 0)
    model = build_model(ModelConfig(hidden=32, layers=1, heads=2, intermediate=48), vocab=257, seq_len=32, seed=1)
    store = open_store(location)
    export(model, tokens, tmp_path / "here" / "model")
    upload(tmp_path / "here" / "model", store, "model")
    download(store, "model", tmp_path / "there")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert loaded.num_parameters() == model.num_parameters()
    assert AutoTokenizer.from_pretrained(tmp_path / "there")("def").input_ids == list(b"def")
