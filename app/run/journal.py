"""The syncer's durable memory: one record a merge, compacted into snapshots.

    journal/<seq>.safetensors     one record; sequence numbers rise by one
    snapshot-<seq>.safetensors    everything up to and including <seq>
    latest.json                   names the newest snapshot; written after it

A writer first claims an epoch, by a record of its own. Records are created exclusively, so of two writers only
one can publish a sequence number: the one that was replaced meets the claim of its successor and gets `Fenced`.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from app.run.record import Record, RecordDamaged, decode, encode
from app.run.storage import Store

_log = logging.getLogger(__name__)

_RECORDS = "journal/"
_SNAPSHOTS = "snapshot-"
_SUFFIX = ".safetensors"
_POINTER = "latest.json"
_RECORD_NAME = re.compile(rf"{_RECORDS}(\d{{12}}){re.escape(_SUFFIX)}")
_SNAPSHOT_NAME = re.compile(rf"{_SNAPSHOTS}(\d{{12}}){re.escape(_SUFFIX)}")
"""What else may lie there, a copy of a record say, is none of ours."""


class Fenced(RuntimeError):
    """Another writer claimed a later epoch: this one must stop writing, for good."""


class JournalDamaged(RuntimeError):
    """A record that others build on is missing or garbled: what came after it can't be trusted."""


class Journal:
    """Records and snapshots in one store (`<run.dir>/checkpoints`). One thread at a time."""

    def __init__(self, store: Store, keep: int) -> None:
        """`keep`: snapshots to keep. With two or more, a damaged newest one costs nothing."""
        self.epoch = 0
        """The epoch that this writer claimed; 0 before."""
        self.dropped: list[str] = []
        """Names of torn last records and damaged snapshots that were left out, newest last."""
        self._store = store
        self._keep = keep
        self._seq = 0
        self._writer = uuid.uuid4().hex

    @property
    def seq(self) -> int:
        """Sequence number of the newest record that this writer appended (its claim included)."""
        return self._seq

    def claim_epoch(self) -> int:
        """Become the one writer: claim the last epoch + 1, durably. Older writers get `Fenced` from now on.

        A torn last record is removed. Call `load` after this, so that nothing is added behind it.

        Raises:
            OSError: the store can't be written.
            JournalDamaged: as `load`.
        """
        tried = 0
        while True:
            seq, epoch = self._newest()
            claim = Record(seq + 1, epoch + 1, self._writer, True, {}, {})
            try:
                self._store.create(_record_name(claim.seq), encode(claim))
            except FileExistsError as error:
                if claim.seq == tried:
                    raise JournalDamaged(f"{_record_name(claim.seq)} is in the way, and no record") from error
                tried = claim.seq
                continue  # the old writer, or another new one, was quicker: look again
            self._seq, self.epoch = claim.seq, claim.epoch
            return self.epoch

    def append(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> int:
        """Add one record; it is durable on return. Returns its sequence number.

        Raises:
            Fenced: another writer claimed a later epoch.
            OSError: the store can't be written; nothing was added, and the same call may be made again later.
            ValueError: no epoch was claimed, or metadata that is not JSON.
        """
        self._must_have_claimed()
        record = Record(self._seq + 1, self.epoch, self._writer, False, dict(meta), dict(tensors))
        name, data = _record_name(record.seq), encode(record)
        try:
            self._store.create(name, data)
        except FileExistsError:
            if not self._is_own(name):
                raise Fenced(f"epoch {self.epoch} has been replaced: {name} is another writer's") from None
            # An attempt that was reported as failed did arrive. Nobody was told of it: put this one there.
            self._store.write(name, data)
        if self._outlived():  # the claim that should have been in the way is compacted away
            self._store.delete(name)
            raise Fenced(f"epoch {self.epoch} has been replaced")
        self._seq = record.seq
        return record.seq

    def snapshot(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> int:
        """Write the whole state after the newest record, then the pointer, then remove what is superfluous.

        Records go only when the oldest kept snapshot covers them. Returns the snapshot's sequence number.

        Raises:
            Fenced, OSError, ValueError: as `append`; the journal is whole whenever this fails.
        """
        self._must_have_claimed()
        self.confirm()
        record = Record(self._seq, self.epoch, self._writer, False, dict(meta), dict(tensors))
        name = f"{_SNAPSHOTS}{record.seq:012d}{_SUFFIX}"
        self._store.write(name, encode(record))
        self._store.write(_POINTER, json.dumps({"snapshot": name, "epoch": self.epoch}).encode())
        self._compact()
        return record.seq

    def confirm(self) -> None:
        """Nobody has taken over from this writer. Reads only; any thread may ask.

        Raises:
            Fenced: another writer claimed a later epoch.
            OSError: the store can't be read.
        """
        following = _record_name(self._seq + 1)
        if self._outlived() or (self._store.exists(following) and not self._is_own(following)):
            raise Fenced(f"epoch {self.epoch} has been replaced")

    def load(self) -> tuple[Record | None, list[Record]]:
        """The newest usable snapshot, if any, and all records after it, oldest first. Claims are left out.

        A damaged last record is left out and named in `dropped`; so is a damaged snapshot when an older one,
        with the records after it, does as well.

        Raises:
            JournalDamaged: a record in the middle is missing or garbled, or no snapshot fits the records.
        """
        seqs = self._record_seqs()
        snapshot = self._base(seqs)
        later = [seq for seq in seqs if snapshot is None or seq > snapshot.seq]
        return snapshot, [record for record in self._records(later) if not record.claim]

    def _base(self, seqs: list[int]) -> Record | None:
        """The snapshot to start from, or None where the records tell everything.

        What it leads to is never less than what the newest snapshot held, be that damaged or lost.
        """
        names = self._snapshot_names()
        must_reach = max(map(_seq_of, names), default=0)
        for name in names:
            snapshot = self._snapshot(name)
            if snapshot is not None:
                later = [seq for seq in seqs if seq > snapshot.seq]
                if (not later or later[0] == snapshot.seq + 1) and max([snapshot.seq, *later]) >= must_reach:
                    return snapshot
        if names and max(seqs, default=0) < must_reach:
            raise JournalDamaged(f"{names[0]} is damaged or missing, and the records do not reach it")
        if seqs[:1] != [1] and (seqs or names):
            raise JournalDamaged("no snapshot can be read that the records follow on")
        return None

    def _records(self, seqs: list[int]) -> list[Record]:
        records: list[Record] = []
        for i, seq in enumerate(seqs):
            if i > 0 and seq != seqs[i - 1] + 1:
                raise JournalDamaged(f"{_record_name(seq - 1)} is missing")
            record = self._record(seq, is_last=i == len(seqs) - 1)
            records += [record] if record else []
        return records

    def _record(self, seq: int, *, is_last: bool) -> Record | None:
        """One record; None for a torn last one."""
        name = _record_name(seq)
        try:
            return self._read(name, seq)
        except RecordDamaged as error:
            if not is_last:
                raise JournalDamaged(f"{name}: {error}") from error
            self._drop(name, error)
            return None

    def _newest(self) -> tuple[int, int]:
        """Highest sequence number and epoch in use; zeros when empty. A torn last record is removed."""
        seqs = self._record_seqs()
        found = [self._base(seqs)]
        if seqs:
            found.append(self._record(seqs[-1], is_last=True))
            if found[-1] is None:
                self._store.delete(_record_name(seqs[-1]))
                found += [self._record(seq, is_last=False) for seq in seqs[-2:-1]]
        whole = [record for record in found if record is not None]
        return max((r.seq for r in whole), default=0), max((r.epoch for r in whole), default=0)

    def _snapshot(self, name: str) -> Record | None:
        try:
            return self._read(name, _seq_of(name))
        except (RecordDamaged, FileNotFoundError, IsADirectoryError) as error:
            self._drop(name, error)
            return None

    def _read(self, name: str, seq: int) -> Record:
        """The record of that name; one that was put there from elsewhere is damaged."""
        record = decode(self._store.read(name))
        if record.seq != seq:
            raise RecordDamaged(f"it is record {record.seq}")
        return record

    def _snapshot_names(self) -> list[str]:
        """Snapshots, newest first: those that are there, and the one that the pointer says was."""
        names = {name for name in self._store.names(_SNAPSHOTS) if _SNAPSHOT_NAME.fullmatch(name)}
        try:
            pointed = json.loads(self._store.read(_POINTER))["snapshot"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            pointed = None
        if isinstance(pointed, str) and _SNAPSHOT_NAME.fullmatch(pointed):
            names.add(pointed)
        return sorted(names, reverse=True)

    def _compact(self) -> None:
        names = [name for name in self._store.names(_SNAPSHOTS) if _SNAPSHOT_NAME.fullmatch(name)]
        for name in names[: -self._keep]:
            self._store.delete(name)
        if len(names) >= self._keep:
            covered = _seq_of(names[-self._keep])
            for seq in self._record_seqs():
                if seq <= covered:
                    self._store.delete(_record_name(seq))

    def _record_seqs(self) -> list[int]:
        return [_seq_of(name) for name in self._store.names(_RECORDS) if _RECORD_NAME.fullmatch(name)]

    def seqs(self) -> list[int]:
        """Sequence numbers of all records that are there, rising."""
        return self._record_seqs()

    def read(self, seq: int) -> Record:
        """One record. Raises FileNotFoundError and RecordDamaged."""
        return self._read(_record_name(seq), seq)

    def _outlived(self) -> bool:
        """Whether there is a snapshot of what came after this writer: only its successor can have made it.

        Records go when such a snapshot covers them, the successor's claim too; the snapshot is not removed by this one.
        """
        names = (name for name in self._store.names(_SNAPSHOTS) if _SNAPSHOT_NAME.fullmatch(name))
        return any(_seq_of(name) > self._seq for name in names)

    def _is_own(self, name: str) -> bool:
        try:
            return decode(self._store.read(name)).writer == self._writer
        except RecordDamaged:
            return False

    def _drop(self, name: str, error: Exception) -> None:
        if name not in self.dropped:
            _log.warning("left out %s: %s", name, error)
            self.dropped.append(name)

    def _must_have_claimed(self) -> None:
        if self.epoch == 0:
            raise ValueError("claim an epoch before writing")


def _record_name(seq: int) -> str:
    return f"{_RECORDS}{seq:012d}{_SUFFIX}"


def _seq_of(name: str) -> int:
    return int(name.removesuffix(_SUFFIX).rpartition("/")[2].removeprefix(_SNAPSHOTS))
