"""Without a network: what is in the local cache is used, and what is not is refused at once."""

import shutil
import socket
import time

import datasets
import huggingface_hub.constants as hub
import pytest

from app.config import ConfigError, DataConfig, ModelConfig
from app.learning import corpus, tokenizer
from app.learning import hub as module
from app.learning.model import build_model
from tests.ports import free_port

SMALL = ModelConfig(hidden=32, layers=1, heads=2, intermediate=48)


@pytest.fixture
def nobody(monkeypatch):
    """A hub at whose address nobody listens, and no proxy."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(module, "getproxies", dict)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "_unreachable", {})
    yield endpoint
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.parametrize(
    ("key", "use"),
    [
        ("model.path", lambda: build_model(ModelConfig(name="hf", path="no/body"), 257, 16, seed=1)),
        ("data.tokenizer", lambda: tokenizer.build("no/body", [], 0)),
        ("data.hub_name", lambda: corpus.read(DataConfig(source="hub", hub_name="no/body"))),
    ],
)
def test_what_is_nowhere_is_refused_at_once(nobody, key, use):
    started = time.monotonic()
    with pytest.raises(ConfigError) as refusal:
        use()
    assert time.monotonic() - started < 15  # its clients would try for 25 s
    assert str(refusal.value).startswith(f"{key}=no/body is refused: ")
    assert f"{nobody} can't be reached" in str(refusal.value)


def test_a_model_in_the_local_cache_is_used(nobody, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--body"
    saved = build_model(SMALL, vocab=257, seq_len=16, seed=5)
    saved.save_pretrained(str(repository / "snapshots" / "abc"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    loaded = build_model(ModelConfig(name="hf", path="some/body"), vocab=257, seq_len=16, seed=1)
    assert loaded.get_input_embeddings().weight.equal(saved.get_input_embeddings().weight)


def test_a_data_set_in_the_local_cache_is_used(nobody, monkeypatch, tmp_path):
    """Loaded from a folder, and then put where the cache would have it under a name of the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "body").mkdir()
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(str(tmp_path / "body" / "train.parquet"))
    datasets.load_dataset(str(tmp_path / "body"), cache_dir=str(tmp_path / "local"))
    (stored,) = (tmp_path / "local").glob("*/*/*")  # <builder>/<configuration>/<version>
    shutil.copytree(stored.parent, tmp_path / "cache" / "some___body" / "default")
    assert [d.text for d in corpus.read(DataConfig(source="hub", hub_name="some/body"))] == ["one", "two"]


def test_nothing_is_asked_for_a_local_folder_or_when_told_to_be_offline(nobody, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_connect", lambda endpoint: pytest.fail(f"asked {endpoint}"))
    assert module.hub_missing(str(tmp_path)) is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert module.hub_missing("some/body") == "HF_HUB_OFFLINE is set"


def test_a_hub_that_listens_or_a_proxy_that_does_is_no_reason_to_go_offline(nobody, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(module, "getproxies", lambda: {"http": f"http://{address}"})
        assert module.hub_missing("some/body") is None
        monkeypatch.setattr(module, "getproxies", dict)
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        assert module.hub_missing("some/body") is None
    assert hub.HF_HUB_OFFLINE is False


def test_a_hub_that_never_answers_is_given_up(nobody, monkeypatch):
    monkeypatch.setattr(module, "CONNECT_S", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):  # its queue is full: nobody else is let in
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{full.getsockname()[1]}")
            assert "can't be reached" in str(module.hub_missing("some/body"))
