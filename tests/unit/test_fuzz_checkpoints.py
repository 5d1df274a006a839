"""Whatever becomes of the files of a run, what is read from them is the truth, or an error that says what is wrong."""

import contextlib
import json
import shutil
import struct
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from app.run import tape
from app.run.journal import Journal, JournalDamaged
from app.run.payloads import PayloadStore
from app.run.record import Record, RecordDamaged, decode, encode
from app.run.storage import LocalStore
from app.run.summary import SummaryDamaged, read_summary
from tests.fuzz import efforts, flipped

RECORD = Record(3, 2, "w", False, {"a": [1, {"b": None}]}, {"theta": torch.arange(6.0), "none": torch.zeros(0)})


@dataclass(frozen=True)
class Damage:
    """One thing that happens to a file; numbers count round."""

    kind: str
    file: int
    other: int
    place: int


damages = st.builds(
    Damage,
    st.sampled_from(["cut", "flip", "empty", "delete", "copy", "swap", "folder", "link", "huge header", "garbage"]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 10**6),
)


def damage(root: Path, what: Damage) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if not files:
        return
    path, other = files[what.file % len(files)], files[what.other % len(files)]
    data = path.read_bytes()
    match what.kind:
        case "cut":
            path.write_bytes(data[: what.place % (len(data) + 1)])
        case "flip" if data:
            path.write_bytes(flipped(data, what.place))
        case "empty":
            path.write_bytes(b"")
        case "delete":
            path.unlink()
        case "copy" if path != other:
            shutil.copy(other, path)
        case "swap":
            kept = other.read_bytes()
            other.write_bytes(data)
            path.write_bytes(kept)
        case "folder":
            path.unlink()
            path.mkdir()
        case "link":
            path.unlink()
            path.symlink_to([path, Path("/etc/passwd"), Path("/nowhere"), other][what.place % 4])
        case "huge header":
            path.write_bytes(struct.pack("<Q", 2**62) + data[8:])
        case "garbage":
            path.write_bytes(bytes([what.place % 256]) * (what.place % 999))


def history(root: Path) -> list[int]:
    """Eleven merges by three writers, compacted twice. Returns them."""
    for epoch in range(3):
        journal = Journal(LocalStore(root), 2)
        journal.claim_epoch()
        for i in range(3 if epoch else 5):
            journal.append({"merge": 10 * epoch + i}, {"theta": torch.full((4,), float(10 * epoch + i))})
            if (epoch, i) in ((0, 0), (0, 3), (1, 1)):
                journal.snapshot({"merge": 10 * epoch + i}, {"theta": torch.full((4,), float(10 * epoch + i))})
    return [*range(5), *range(10, 13), *range(20, 23)]


@efforts
def test_a_damaged_journal_tells_the_truth_or_nothing(effort: settings, tmp_path: Path) -> None:
    """What it tells is the history up to some point, not before the newest snapshot that is told of anywhere."""
    truth = history(tmp_path / "whole")

    @effort
    @given(st.lists(damages, min_size=1, max_size=4))
    def holds(faults: list[Damage]) -> None:
        root = tmp_path / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", root)
        for fault in faults:
            damage(root, fault)
        try:
            snapshot, records = Journal(LocalStore(root), 2).load()
        except (JournalDamaged, OSError):
            snapshot, records = None, []
        told = [record.meta["merge"] for record in [*([snapshot] if snapshot else []), *records]]
        assert told == truth[truth.index(told[0]) :][: len(told)] if told else True
        for record in [*([snapshot] if snapshot else []), *records]:
            assert record.tensors["theta"].tolist() == [record.meta["merge"]] * 4
        with contextlib.suppress(JournalDamaged, OSError):  # in any case it comes to an end
            journal = Journal(LocalStore(root), 2)
            journal.claim_epoch()
            again, later = journal.load()
            assert [r.meta["merge"] for r in [*([again] if again else []), *later]] == told

    holds()


def test_what_the_pointer_names_must_be_reached(tmp_path: Path) -> None:
    """The newest snapshot and all records after the one before it are gone: nobody goes back behind their backs."""
    history(tmp_path)
    snapshots = sorted(tmp_path.glob("snapshot-*"))
    assert len(snapshots) == 2
    snapshots[1].unlink()
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    with pytest.raises(JournalDamaged, match=f"{snapshots[1].name} is damaged or missing"):
        Journal(LocalStore(tmp_path), 2).load()


@pytest.mark.parametrize("name", ["journal/000000000003 (copy).safetensors", "snapshot-old.safetensors", "journal/x"])
def test_what_is_none_of_ours_is_passed_over(name: str, tmp_path: Path) -> None:
    truth = history(tmp_path)
    (tmp_path / name).write_bytes(b"?")
    journal = Journal(LocalStore(tmp_path), 2)
    journal.claim_epoch()
    snapshot, records = journal.load()
    assert snapshot is not None
    told = [snapshot.meta["merge"], *(record.meta["merge"] for record in records)]
    assert told == truth[-len(told) :]
    journal.snapshot({"merge": 99}, {})
    assert (tmp_path / name).read_bytes() == b"?"


def test_a_folder_where_the_next_record_belongs_is_named(tmp_path: Path) -> None:
    history(tmp_path)
    journal = Journal(LocalStore(tmp_path), 2)
    journal.claim_epoch()
    (tmp_path / "journal" / f"{journal.seq + 1:012d}.safetensors").mkdir()
    with pytest.raises(JournalDamaged, match="is in the way, and no record"):
        Journal(LocalStore(tmp_path), 2).claim_epoch()


@efforts
def test_a_record_is_whole_or_refused(effort: settings) -> None:
    whole = encode(RECORD)

    @effort
    @given(
        st.one_of(
            st.binary(max_size=200),
            st.integers(0, len(whole) - 1).map(lambda end: whole[:end]),
            st.integers(0, 8 * len(whole) - 1).map(lambda place: flipped(whole, place)),
            st.integers(0, 2**64 - 1).map(lambda size: struct.pack("<Q", size) + whole[8:]),
            st.binary(min_size=1, max_size=50).map(lambda more: whole + more),
        )
    )
    def holds(data: bytes) -> None:
        if data != whole:
            with pytest.raises(RecordDamaged):
                decode(data)

    holds()


@pytest.mark.parametrize("size", [2**31, 2**40, 2**63, 2**64 - 1])
def test_a_declared_size_allocates_nothing(size: int) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    for data in (struct.pack("<Q", size) + b"{}", struct.pack("<Q", len(header)) + header):
        tracemalloc.start()
        try:
            with pytest.raises(RecordDamaged):
                decode(data)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "envelope", ["{}", "[]", "null", '{"seq": 1}', '{"more": 1, "seq": 1, "epoch": 1, "writer": "", "claim": true}']
)
def test_a_sealed_record_of_another_kind_is_refused(envelope: str) -> None:
    from app.run.record import _checksum

    data = save({}, metadata={"record": envelope, "checksum": _checksum(envelope, {})})
    with pytest.raises(RecordDamaged):
        decode(data)


def test_a_damaged_first_state_of_a_replay_is_refused(tmp_path: Path) -> None:
    store = PayloadStore(LocalStore(tmp_path))
    store.keep_first({}, {})
    path = tmp_path / "version-0.safetensors"
    path.write_bytes(flipped(path.read_bytes(), 400))
    with pytest.raises(RecordDamaged):
        store.first()


@efforts
def test_a_damaged_tape_loses_lines_and_no_more(effort: settings, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = tape.Tape(path)
    for i in range(20):
        written.write("step", number=i)
    written.close()
    whole = path.read_bytes()

    @effort
    @given(
        st.lists(
            st.tuples(
                st.integers(0, len(whole)),
                st.one_of(
                    st.binary(max_size=20),
                    st.sampled_from([b"\n[]\n", b"\n{}\n", b'\n{"kind": 1, "at": "x"}\n', b"\n" + b"[" * 100_000]),
                ),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def holds(faults: list[tuple[int, bytes]]) -> None:
        data = whole
        for place, junk in faults:
            data = data[:place] + junk + data[place + len(junk) :]
        path.write_bytes(data)
        for event in tape.read(path)[0]:
            assert isinstance(event["kind"], str)
            assert event["at"] > 0 or event["at"] <= 0
        again = tape.Tape(path)
        again.write("step", number=99)
        again.close()
        assert tape.read(path)[0][-1]["number"] == 99

    holds()


@efforts
def test_a_summary_is_one_or_refused(effort: settings, tmp_path: Path) -> None:
    @effort
    @given(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from([b"[" * 100_000, b"{}", b"null", b'{"status": "completed"}', b'{"status": [], "x": 1}']),
        )
    )
    def holds(data: bytes) -> None:
        (tmp_path / "summary.json").write_bytes(data)
        with pytest.raises(SummaryDamaged):
            read_summary(LocalStore(tmp_path))

    holds()
