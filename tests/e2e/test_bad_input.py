"""Files that a user hands in or that a run has left, damaged in every way: one line, exit 2, nothing changed.

In one process, as its imports take longer than all of this: what a refusal needs lies before Ray starts.
"""

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.driver import prepare_run
from app.config import load
from app.run.folder import open_folder
from app.train import main
from tests.small import SMALL

pytestmark = pytest.mark.timeout(120)

OVERRIDES = [*SMALL, "learners=2", "run.preload=false"]
WORDS = " ".join(f"word{i % 97}" for i in range(20_000))


def written(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def linked(path: Path, target: Path | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


def folder(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    return path


def sparse(path: Path, size: int) -> Path:
    with written(path, "").open("r+b") as file:
        file.truncate(size)
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def everything(root: Path) -> dict[str, str]:
    """What lies under a folder, but for its lock: links by their target, files by their hash."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file() and path.name != ".lock" and path.stat().st_size < 2**30:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def refused(capfd: pytest.CaptureFixture[str], *overrides: str, parts: list[str]) -> None:
    """One line on stderr with all of these parts, exit code 2, and Ray was not started."""
    capfd.readouterr()
    try:
        code = main([*OVERRIDES, *overrides])
    finally:
        gc.enable()
    out, err = capfd.readouterr()
    assert code == 2, out + err
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, err
    assert err.splitlines()[-1] == lines[0]
    assert "Traceback" not in out + err
    assert "starting Ray" not in out
    for part in parts:
        assert part in lines[0], lines[0]


DATA: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (lambda p: p.parent, ["no such file"]),
    "empty": (lambda p: written(p / "a.txt", ""), ["there is no text in it"]),
    "empty folder": (lambda p: folder(p / "sub"), [".txt, .jsonl, .parquet"]),
    "another kind": (lambda p: written(p / "a.pdf", "x"), [".txt, .jsonl, .parquet"]),
    "not UTF-8": (lambda p: written(p / "a.txt", b"good \xff bad"), ["a.txt", "UTF-8", "byte 5"]),
    "too short": (lambda p: written(p / "a.txt", "short"), ["data.seq_len=32", "shorter than one sample"]),
    "no JSON": (lambda p: written(p / "a.jsonl", "{not json\n"), ["a.jsonl", "cannot be read"]),
    "JSON not UTF-8": (lambda p: written(p / "a.jsonl", b'{"text": "\xff"}\n'), ["a.jsonl", "cannot be read"]),
    "JSON without text": (lambda p: written(p / "a.jsonl", '{"other": "x"}\n'), ["a.jsonl", "'text'", "other"]),
    "no text but a number": (lambda p: written(p / "a.jsonl", '{"text": 5}\n'), ["a.jsonl", "'text'"]),
    "no parquet": (lambda p: written(p / "a.parquet", b"PAR1garbage"), ["a.parquet", "cannot be read"]),
    "empty parquet": (lambda p: written(p / "a.parquet", b""), ["a.parquet", "cannot be read"]),
    "huge": (lambda p: sparse(p / "a.txt", 2**43), ["a.txt", "8,796,093,022,208 bytes", "data.max_bytes"]),
    "link outside": (lambda p: linked(p / "a.txt", "/etc/hostname"), ["a.txt", "is a link to", "outside"]),
    "link in a circle": (lambda p: linked(p / "a.txt", "a.txt"), ["a.txt", "cannot be read"]),
    "link to nowhere": (lambda p: linked(p / "a.txt", "b"), ["a.txt", "cannot be read"]),
    "folder for a file": (lambda p: folder(p / "a.txt"), ["a.txt", "no regular file"]),
    "pipe": (lambda p: pipe(folder(p) / "a.txt"), ["a.txt", "no regular file"]),
}


@pytest.mark.parametrize("how", DATA)
def test_data_files(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, parts = DATA[how]
    make(tmp_path / "data")
    before = everything(tmp_path / "data")
    overrides = ["data=files", f"data.path={tmp_path / 'data'}", f"run.dir={tmp_path / 'run'}", "data.max_bytes=null"]
    refused(capfd, *overrides, parts=parts)
    assert everything(tmp_path / "data") == before
    assert not list((tmp_path / "run").glob("checkpoints/*"))


TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "empty folder": lambda p: folder(p),
    "no JSON": lambda p: written(p / "tokenizer.json", "{"),
    "not UTF-8": lambda p: written(p / "tokenizer.json", b"\xff\xfe"),
    "empty": lambda p: written(p / "tokenizer.json", ""),
    "of another kind": lambda p: written(p / "tokenizer.json", "[1, 2]"),
    "a file": lambda p: written(p, "text"),
    "code of its own": lambda p: (
        written(p / "tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'),
        written(p / "evil.py", "import pathlib; pathlib.Path('EVIL').touch()\nclass Evil: ...\n"),
    ),
}


@pytest.mark.parametrize("how", TOKENIZERS)
def test_tokenizers(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    TOKENIZERS[how](tmp_path / "tokenizer")
    written(tmp_path / "data/a.txt", WORDS)
    overrides = ["data=files", f"data.path={tmp_path / 'data'}", f"run.dir={tmp_path / 'run'}"]
    refused(capfd, *overrides, f"data.tokenizer={tmp_path / 'tokenizer'}", parts=["data.tokenizer", "tokenizer"])
    assert not Path("EVIL").exists()


PLACES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a file": (lambda p: written(p, "mine"), ["run.dir", "can't be used"]),
    "under a file": (lambda p: written(p.parent, "mine"), ["run.dir", "can't be used"]),
    "a link in a circle": (lambda p: linked(p, p.name), ["run.dir", "can't be used"]),
}


@pytest.mark.parametrize("how", PLACES)
def test_places_for_a_run(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, parts = PLACES[how]
    place = tmp_path / "above" / "run"
    make(place)
    before = everything(tmp_path)
    refused(capfd, f"run.dir={place}", parts=parts)
    assert everything(tmp_path) == before


def snapshot(run: Path) -> Path:
    (only,) = (run / "checkpoints").glob("snapshot-*")
    return only


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def changed(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def another_run(run: Path) -> None:
    changed(run / "checkpoints/run.json", '{"run_id": "', '{"run_id": "x')


RUNS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "config missing": (lambda r: (r / "config.yaml").unlink(), ["holds a checkpoint but no config.yaml"]),
    "config empty": (lambda r: written(r / "config.yaml", ""), ["config.yaml", "damaged", "missing"]),
    "config no YAML": (lambda r: written(r / "config.yaml", "a: [b"), ["config.yaml", "damaged", "YAML"]),
    "config a list": (lambda r: written(r / "config.yaml", "- a"), ["config.yaml", "damaged"]),
    "config not UTF-8": (lambda r: written(r / "config.yaml", b"a: \xff"), ["config.yaml", "damaged", "utf-8"]),
    "config with a tag": (
        lambda r: written(r / "config.yaml", "learners: !!python/object/apply:os.system ['touch EVIL']"),
        ["config.yaml", "damaged"],
    ),
    "config with aliases": (
        lambda r: written(r / "config.yaml", "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(9))),
        ["config.yaml", "damaged", "alias"],
    ),
    "config deep": (lambda r: written(r / "config.yaml", "[" * 50_000), ["config.yaml", "damaged"]),
    "config huge": (lambda r: sparse(r / "config.yaml", 2**40), ["config.yaml", "damaged", "1,099,511,627,776 bytes"]),
    "config of a wrong type": (
        lambda r: changed(r / "config.yaml", "learners: 2", "learners: many"),
        ["config.yaml", "damaged", "learners"],
    ),
    "config with unknown keys": (
        lambda r: changed(r / "config.yaml", "learners: 2", "learners: 2\nlerners: 2"),
        ["config.yaml", "damaged", "lerners"],
    ),
    "config a folder": (lambda r: folder(r / "config.yaml"), ["run.dir", "config.yaml"]),
    "config a link in a circle": (lambda r: linked(r / "config.yaml", "config.yaml"), ["run.dir", "config.yaml"]),
    "id missing": (lambda r: (r / "checkpoints/run.json").unlink(), ["no checkpoints/run.json"]),
    "id empty": (lambda r: written(r / "checkpoints/run.json", ""), ["checkpoints/run.json", "damaged"]),
    "id a list": (lambda r: written(r / "checkpoints/run.json", "[]"), ["checkpoints/run.json", "damaged"]),
    "id a number": (lambda r: written(r / "checkpoints/run.json", '{"run_id": 5}'), ["run.json", "damaged"]),
    "id a path": (lambda r: written(r / "checkpoints/run.json", '{"run_id": "../x"}'), ["run.json", "damaged"]),
    "id not UTF-8": (lambda r: written(r / "checkpoints/run.json", b"\xff"), ["checkpoints/run.json", "damaged"]),
    "id deep": (lambda r: written(r / "checkpoints/run.json", "[" * 90_000), ["checkpoints/run.json", "damaged"]),
    "id a folder": (lambda r: folder(r / "checkpoints/run.json"), ["run.json"]),
    "id of another run": (another_run, ["checkpoint", "another run"]),
    "snapshot cut": (lambda r: os.truncate(snapshot(r), 500), ["checkpoint can't be used", "snapshot-"]),
    "snapshot flipped": (lambda r: flip(snapshot(r)), ["checkpoint can't be used", "snapshot-"]),
    "snapshot empty": (lambda r: written(snapshot(r), ""), ["checkpoint can't be used", "snapshot-"]),
    "snapshot missing": (lambda r: snapshot(r).unlink(), ["snapshot-"]),
    "snapshot a folder": (lambda r: folder(snapshot(r)), ["snapshot-"]),
    "snapshot elsewhere": (lambda r: linked(snapshot(r), "/etc/hostname"), ["checkpoint can't be used", "snapshot-"]),
    "snapshot with a huge header": (
        lambda r: written(snapshot(r), b"\xff" * 7 + b"\x7f" + snapshot(r).read_bytes()[8:]),
        ["checkpoint can't be used", "snapshot-"],
    ),
    "journal damaged in the middle": (
        lambda r: [written(r / f"checkpoints/journal/{i:012d}.safetensors", "x") for i in (2, 3)],
        ["checkpoint can't be used", "journal/000000000002"],
    ),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has its data and version 0."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    config = load([*OVERRIDES, f"run.dir={run}"])
    opened = open_folder(config)
    prepare_run(config, opened)
    assert opened.lock is not None
    opened.lock.release()
    assert json.loads((run / "checkpoints/latest.json").read_text())["snapshot"].startswith("snapshot-")
    return run


@pytest.mark.parametrize("how", RUNS)
def test_runs_to_go_on_with(how: str, prepared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harm, parts = RUNS[how]
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    harm(run)
    before = everything(run)
    refused(capfd, f"run.dir={run}", "run.resume=auto", parts=["run.dir", *parts])
    assert everything(run) == before
    assert not Path("EVIL").exists()
