"""Where the text comes from: the embedded corpus, local files, a data set of the hub; and what is held out of it.

The embedded corpus is the running Python's own standard library, so every machine that can run the project has it.
A corpus is read into memory as text; it is packed once and memory-mapped from then on (`app.learning.data`).
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from app.config import ConfigError, DataConfig
from app.learning.hub import hub_missing

PRUNED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
ROW_READERS = {".jsonl": "json", ".parquet": "parquet"}
SUFFIXES = (".txt", *ROW_READERS)


@dataclass(frozen=True)
class Document:
    """One text and a name that stays the same from run to run."""

    name: str
    text: str


@dataclass(frozen=True)
class CorpusFacts:
    """What was read, so that two machines can tell whether they have the same text."""

    documents: int
    bytes: int
    sha256: str
    python: str

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-able values."""
        return asdict(self)


def read(config: DataConfig) -> list[Document]:
    """Read the whole corpus, in an order that only depends on names, cut after `max_bytes` bytes of UTF-8.

    Raises ConfigError when it cannot be read or reached, when there is no text in it or the text field is missing.
    """
    readers = {"stdlib": _stdlib_documents, "files": _file_documents, "hub": _hub_documents}
    with reading(config):
        documents = [d for d in _limited(readers[config.source](config), config.max_bytes) if d.text]
    if not documents:
        raise ConfigError(*place_of(config), "there is no text in it")
    return documents


def source_stamp(config: DataConfig) -> dict[str, Any]:
    """Return what identifies the source without reading it: names, sizes and times of files, Python's version.

    Raises ConfigError when it can't be told.
    """
    if config.source == "stdlib":
        return {"python": platform.python_version()}
    if config.source == "files":
        with reading(config):
            return {"files": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in corpus_files(config)]}
    return {"hub": [config.hub_name, config.hub_config, config.split]}


def facts(documents: Iterable[Document]) -> CorpusFacts:
    """Count documents and UTF-8 bytes and hash names and texts."""
    digest = hashlib.sha256()
    count = size = 0
    for document in documents:
        data = document.text.encode()
        digest.update(f"{document.name}\0{len(data)}\0".encode())
        digest.update(data)
        count += 1
        size += len(data)
    return CorpusFacts(count, size, digest.hexdigest(), platform.python_version())


def split(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Split into (training, held out) by whole documents; `share` in (0, 1) of them is held out.

    A document is held out when the hash of its name, read as a fraction, is below `share`: adding or removing other
    documents never moves it. At least one document lands on each side; of a single document the end is held out.
    """
    ranks = {d.name: _fraction(d.name) for d in documents}
    if len(ranks) == 1:
        only = documents[0]
        cut = max(1, min(len(only.text) - 1, round(len(only.text) * (1 - share))))
        return [Document(only.name, only.text[:cut])], [Document(only.name, only.text[cut:])]
    by_rank = sorted(ranks, key=lambda name: ranks[name])
    below = sum(rank < share for rank in ranks.values())
    held = set(by_rank[: max(1, min(len(by_rank) - 1, below))])
    return [d for d in documents if d.name not in held], [d for d in documents if d.name in held]


def is_held_out(document: Document, share: float) -> bool:
    """Whether a stream keeps this document for evaluation: the hash of its name, as a fraction, is below `share`."""
    return _fraction(document.name) < share


def corpus_files(config: DataConfig) -> list[Path]:
    """Return the files of `data.path`: itself, or all of a folder that end in .txt, .jsonl or .parquet, sorted."""
    root = _root(config)
    if not root.exists():
        raise ConfigError("data.path", config.path, "no such file or folder")
    found = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES) if root.is_dir() else [root]
    if not found or found[0].suffix not in SUFFIXES:
        raise ConfigError("data.path", config.path, f"no {', '.join(SUFFIXES)} file there")
    for path in found:
        _check_file(root, path, config)
    return found


def _check_file(root: Path, path: Path, config: DataConfig) -> None:
    """Refuse what is no file of this folder, or fits into no memory: reading it would wait or grow without end."""
    try:
        target, place = path.resolve(strict=True), root.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # links to nowhere, or in a circle
        raise ConfigError("data.path", path, f"cannot be read ({one_line(error)})") from error
    if not target.is_relative_to(place):
        raise ConfigError("data.path", path, f"it is a link to {target}, outside of {place}; a copy is needed")
    if not target.is_file():
        raise ConfigError("data.path", path, "it is no regular file")
    size, free = target.stat().st_size, psutil.virtual_memory().available
    if path.suffix == ".txt" and min(size, config.max_bytes or size) > free:
        why = f"it has {size:,} bytes and {free:,} of memory are free; data.max_bytes takes less of it"
        raise ConfigError("data.path", path, why)


def _stdlib_documents(_config: DataConfig) -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in PRUNED)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                yield Document(path.relative_to(root).as_posix(), path.read_bytes().decode(errors="replace"))


def _file_documents(config: DataConfig) -> Iterator[Document]:
    root = _root(config)
    for path in corpus_files(config):
        name = path.relative_to(root).as_posix() if root.is_dir() else path.name
        if path.suffix == ".txt":
            yield Document(name, _text_of(path, config.max_bytes))
        else:
            rows = _local_rows(path)
            yield from row_documents(rows, config.text_field, name, ("data.path", str(path)))


def _local_rows(path: Path) -> Iterator[dict[str, Any]]:
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # what is wrong with a file is in the refusal
    try:
        reader = ROW_READERS[path.suffix]
        yield from datasets.load_dataset(reader, data_files=str(path), split="train", streaming=True)
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # a damaged file
        raise ConfigError("data.path", path, f"cannot be read ({one_line(error)})") from error


def _hub_documents(config: DataConfig) -> Iterator[Document]:
    rows = _hub_rows(config)
    yield from row_documents(rows, config.text_field, str(config.hub_name), place_of(config))


def _hub_rows(config: DataConfig) -> Iterator[dict[str, Any]]:
    """Rows as the hub sends them; where it can't be reached, those that an earlier use has left in the local cache."""
    missing = hub_missing(str(config.hub_name))
    import datasets

    streaming = missing is None
    try:
        yield from datasets.load_dataset(config.hub_name, config.hub_config, split=config.split, streaming=streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = (
            f"it can't be loaded from the local cache, and {missing}"
            if missing
            else f"cannot be read ({one_line(error)})"
        )
        raise ConfigError("data.hub_name", config.hub_name, why) from error


def row_documents(
    rows: Iterable[dict[str, Any]], field: str, name: str, place: tuple[str, str | None]
) -> Iterator[Document]:
    """Yield one document a row. A row's name holds a hash of its text, so equal rows stay on one side of the split."""
    for row in rows:
        text = row.get(field)
        if not isinstance(text, str):
            raise ConfigError(*place, f"no text in the field {field!r} (fields: {', '.join(sorted(row))})")
        yield Document(f"{name}:{hashlib.sha256(text.encode()).hexdigest()}", text)


def _limited(documents: Iterable[Document], max_bytes: int | None) -> Iterator[Document]:
    left = max_bytes
    for document in documents:
        if left is not None and len(data := document.text.encode()) >= left:
            yield Document(document.name, data[:left].decode(errors="ignore"))
            return
        if left is not None:
            left -= len(data)
        yield document


def place_of(config: DataConfig) -> tuple[str, str | None]:
    """The key that says where the text is, and its value."""
    places = {"files": ("data.path", config.path), "hub": ("data.hub_name", config.hub_name)}
    return places.get(config.source, ("data.source", config.source))


@contextmanager
def reading(config: DataConfig) -> Iterator[None]:
    """Turn an OSError inside into a ConfigError that names the source."""
    try:
        yield
    except OSError as error:
        raise ConfigError(*place_of(config), f"cannot be read ({one_line(error)})") from error


def _root(config: DataConfig) -> Path:
    return Path(config.path or "no data.path").expanduser()


def _text_of(path: Path, max_bytes: int | None) -> str:
    """The text of a file, or as much of its beginning as can be wanted. Raises ConfigError when it is not UTF-8."""
    with path.open("rb") as file:
        data = file.read(-1 if max_bytes is None else max_bytes)
        whole = not file.read(1)
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        raise ConfigError("data.path", path, f"UTF-8 text is needed; byte {error.start} of it is none") from error


def _fraction(name: str) -> float:
    """Return a hash of `name` as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) / 2**48


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
