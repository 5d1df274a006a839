"""Checks on what is read from outside: the model, the text and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from app.config.error import ConfigError
from app.config.rules import at_least, one_of, open_interval
from app.config.schema import DATA_SOURCES, MODEL_NAMES, Config


def check_model(config: Config, here: bool) -> None:
    """Refuse a model that can't be built; `here`: as far as files of this machine tell. Raises ConfigError."""
    model = config.model
    one_of("model.name", model.name, MODEL_NAMES)
    if model.name == "hf":
        if not model.path:
            raise ConfigError("model.path", model.path, "a model folder or a hub name is needed when model.name=hf")
        if here:
            _local_exists("model.path", model.path)
        return
    for key in ("hidden", "layers", "heads", "intermediate"):
        at_least(f"model.{key}", getattr(model, key), 1)
    if model.hidden % (2 * model.heads) != 0:
        allowed = f"a multiple of {2 * model.heads} is needed (2 × model.heads={model.heads}: even width of a head)"
        raise ConfigError("model.hidden", model.hidden, allowed)


def check_data(config: Config, here: bool) -> None:
    """Refuse text that can't be read or handed out; `here` as for the model. Raises ConfigError."""
    data = config.data
    one_of("data.source", data.source, DATA_SOURCES)
    if data.source == "files":
        if not data.path:
            raise ConfigError("data.path", data.path, "a file or folder is needed when data.source=files")
        if here and "://" not in data.path and not Path(data.path).expanduser().exists():
            raise ConfigError("data.path", data.path, "no such file or folder")
    if not data.split:
        raise ConfigError("data.split", "", "the name of a split is needed")
    if data.source == "hub" and not data.hub_name:
        raise ConfigError("data.hub_name", data.hub_name, "the name of a data set is needed when data.source=hub")
    if here and data.tokenizer not in ("train", "bytes"):
        _local_exists("data.tokenizer", data.tokenizer)
    if data.tokenizer == "train":
        at_least("data.vocab", data.vocab, 257)
    at_least("data.seq_len", data.seq_len, 2)
    open_interval("data.heldout_share", data.heldout_share, 0.0, 1.0)
    at_least("data.block_samples", data.block_samples, 1)
    at_least("data.leases_ahead", data.leases_ahead, 1)
    at_least("data.eval_samples", data.eval_samples, 1)
    if data.max_bytes is not None:
        at_least("data.max_bytes", data.max_bytes, 1)
    at_least("data.stream_head", data.stream_head, 2)
    at_least("data.stream_patience_s", data.stream_patience_s, 0.0)
    if data.streaming and data.source == "stdlib":
        raise ConfigError("data.streaming", True, "only with data.source=files or data.source=hub")
    if data.streaming and data.max_bytes is not None:
        raise ConfigError("data.max_bytes", data.max_bytes, "null where data.streaming is true")


def _local_exists(key: str, path: str) -> None:
    """Refuse a missing local path. Anything that is not clearly a path is taken for a hub name."""
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if looks_local and "://" not in path and not Path(path).expanduser().exists():
        raise ConfigError(key, path, "no such file or folder")
