"""From text to packed samples on disk, memory-mapped by every process that trains or evaluates.

`prepare` writes a folder: `train/` and `heldout/` (datasets of rows of `seq_len` token ids), `tokenizer/`,
`token_bytes.npy` and, last, `manifest.json`. A folder without a manifest, or with one of other settings, is rebuilt.

Of a stream only the head is read: `train/` then holds no more than that, and learners get their rows from
`app.learning.stream`.

Rows overlap by one token, so that every token but the stream's first is predicted exactly once:
row i holds tokens i·(S−1) to i·(S−1)+S−1 of the stream "eos text eos text eos …" (S = seq_len).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.config import ConfigError, DataConfig
from app.learning import corpus, stream, tokenizer
from app.learning.reference import gzip_bits_per_byte
from app.learning.rows import TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_log = logging.getLogger(__name__)

FORMAT = 1
"""Counts changes of what is written, so that folders of older code are rebuilt."""
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 2**24
"""Ours have a few hundred."""
PARTS = ("train", "heldout", "tokenizer", "token_bytes.npy")


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds. Equal `samples_sha256` means equal training samples, on any machine."""

    fingerprint: str
    corpus: dict[str, Any]
    vocab: int
    eos_id: int
    seq_len: int
    train_samples: int
    heldout_samples: int
    heldout_documents: int
    heldout_bytes: int
    bytes_per_token: float
    gzip_bits_per_byte: float
    samples_sha256: str


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder, opened: token rows [N, S] memory-mapped, and the UTF-8 bytes of each token [V]."""

    folder: Path
    manifest: Manifest
    train: TokenRows
    heldout: TokenRows
    token_bytes: npt.NDArray[np.int32]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Load the tokenizer (imports transformers)."""
        return tokenizer.load(self.folder / "tokenizer")


def prepare(config: DataConfig, out_dir: Path) -> PreparedData:
    """Tokenise, pack and save the corpus of `config` to `out_dir`, unless it is there already; return it opened.

    What is there and damaged is made again, and must come out the same. Raises ConfigError when it does not, when the
    text or the tokenizer can't be used, or when a side of the split is too small for one row of `seq_len` tokens, and
    OSError when `out_dir` can't be written.
    """
    fingerprint = _fingerprint(config)
    found = _read_manifest(out_dir)
    known = found is not None and found.fingerprint == fingerprint
    if known and (data := _whole(out_dir)) is not None:
        return data
    _clear(out_dir)
    manifest = _build(config, out_dir, fingerprint)
    if found is not None and known and found.samples_sha256 != manifest.samples_sha256:
        _write_manifest(found, out_dir)  # so that the next start is refused, too
        raise ConfigError(*corpus.place_of(config), "the text has changed since it was prepared, and that is damaged")
    _write_manifest(manifest, out_dir)
    return load(out_dir)


def _whole(out_dir: Path) -> PreparedData | None:
    """The folder, opened; None when it does not hold what its manifest says."""
    try:
        data = load(out_dir)
        manifest = data.manifest
        sizes = (len(data.train), len(data.heldout), len(data.token_bytes), len(data.tokenizer()))
        if sizes != (manifest.train_samples, manifest.heldout_samples, manifest.vocab, manifest.vocab):
            raise ValueError(f"it has other sizes than its manifest says: {sizes}")
        if data.train.sha256() != manifest.samples_sha256:
            raise ValueError("its samples are not those of its manifest")
        if data.heldout.width != manifest.seq_len or data.heldout.largest() >= manifest.vocab:
            raise ValueError("what is held out does not fit its manifest")
    except Exception as error:  # whatever garbled files make of their readers
        _log.warning("%s is damaged and made again: %s", out_dir, error)
        return None
    return data


def has_changed(config: DataConfig, out_dir: Path) -> bool:
    """Whether `out_dir` holds samples that `config` would not give any more: other settings, or another text."""
    found = _read_manifest(out_dir)
    return found is not None and found.fingerprint != _fingerprint(config)


def load(out_dir: Path) -> PreparedData:
    """Open a prepared folder. Raises FileNotFoundError when it is not complete."""
    manifest = _read_manifest(out_dir)
    if manifest is None:
        raise FileNotFoundError(f"{out_dir}: no prepared data there ({MANIFEST} is missing or damaged)")
    return PreparedData(
        folder=out_dir,
        manifest=manifest,
        train=TokenRows.open(out_dir / "train"),
        heldout=TokenRows.open(out_dir / "heldout"),
        token_bytes=np.array(np.load(out_dir / "token_bytes.npy", mmap_mode="r")),  # not longer than the file
    )


def pack(tokens: tokenizer.TokenIds, seq_len: int) -> tokenizer.TokenIds:
    """Cut a stream of tokens [T] into rows [N, S] that overlap by one token; the rest of the stream is left out."""
    if len(tokens) < seq_len:
        return tokens[:0].reshape(0, seq_len)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len)
    return np.ascontiguousarray(windows[:: seq_len - 1])


def _build(config: DataConfig, out_dir: Path, fingerprint: str) -> Manifest:
    documents = stream.head(config) if config.streaming else corpus.read(config)
    train, heldout = _sides(documents, config)
    tokens = tokenizer.build(config.tokenizer, [d.text for d in train], config.vocab)
    packed = {}
    for name, side in (("train", train), ("heldout", heldout)):
        packed[name] = _packed(config, tokens, [d.text for d in side])
        if len(packed[name]) == 0:
            raise ConfigError("data.seq_len", config.seq_len, f"the {name} text is shorter than one sample")
        TokenRows.save(packed[name], out_dir / name)
    tokens.save_pretrained(str(out_dir / "tokenizer"))
    sizes = tokenizer.token_bytes(tokens)
    np.save(out_dir / "token_bytes.npy", sizes)
    heldout_text = "".join(d.text for d in heldout).encode()
    train_bytes = int(sizes[packed["train"][:, 1:]].sum(dtype=np.int64))
    return Manifest(
        fingerprint=fingerprint,
        corpus=corpus.facts(documents).as_dict(),
        vocab=len(tokens),
        eos_id=int(tokens.eos_token_id),
        seq_len=config.seq_len,
        train_samples=len(packed["train"]),
        heldout_samples=len(packed["heldout"]),
        heldout_documents=len(heldout),
        heldout_bytes=len(heldout_text),
        bytes_per_token=train_bytes / packed["train"][:, 1:].size,
        gzip_bits_per_byte=gzip_bits_per_byte(heldout_text),
        samples_sha256=hashlib.sha256(packed["train"].tobytes()).hexdigest(),
    )


def _sides(documents: list[corpus.Document], config: DataConfig) -> tuple[list[corpus.Document], list[corpus.Document]]:
    """(training, held out). Of a stream: by the rule that its reader goes by as well."""
    if not config.streaming:
        return corpus.split(documents, config.heldout_share)
    held = [d for d in documents if corpus.is_held_out(d, config.heldout_share)]
    train = list(stream.trained_on(documents, config))
    for what, side in (("held out", held), ("trained on", train)):
        if not side:
            why = f"none of the first {len(documents)} documents is {what}: more of them, or another data.heldout_share"
            raise ConfigError("data.stream_head", config.stream_head, why)
    return train, held


def _packed(config: DataConfig, tokens: PreTrainedTokenizerFast, texts: list[str]) -> tokenizer.TokenIds:
    ids = tokenizer.encode(tokens, config.tokenizer, texts)
    return pack(np.concatenate([ids[-1:], ids]), config.seq_len)


def _fingerprint(config: DataConfig) -> str:
    """Hash what decides the content: the source as it is now and the settings of splitting, tokenizer and packing."""
    content = {
        "format": FORMAT,
        "stamp": corpus.source_stamp(config),
        "words": tokenizer.WORDS,
        **{key: value for key, value in asdict(config).items() if key not in _NOT_CONTENT},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_NOT_CONTENT = frozenset({"block_samples", "leases_ahead", "eval_samples", "stream_patience_s"})


def _read_manifest(out_dir: Path) -> Manifest | None:
    try:
        path = out_dir / MANIFEST
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            return None
        manifest = Manifest(**json.loads(path.read_text()))
    except (FileNotFoundError, IsADirectoryError, ValueError, TypeError, RecursionError):
        return None
    kinds = {"str": str, "int": int, "float": float, "dict[str, Any]": dict}
    fits = all(type(getattr(manifest, field.name)) is kinds[str(field.type)] for field in fields(manifest))
    return manifest if fits else None


def _write_manifest(manifest: Manifest, out_dir: Path) -> None:
    temporary = out_dir / f"{MANIFEST}.tmp"
    with temporary.open("w") as file:
        json.dump(asdict(manifest), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out_dir / MANIFEST)


def _clear(out_dir: Path) -> None:
    """Remove the manifest first, then what it vouched for."""
    for part in (MANIFEST, *PARTS):
        path = out_dir / part
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    out_dir.mkdir(parents=True, exist_ok=True)
