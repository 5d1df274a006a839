"""Consistent cuts on disk, each a folder: the syncer's part, the ledger's, one of each learner, and last a manifest.

cuts/<epoch>-<number>/syncer.safetensors
                     /ledger.json
                     /learner-<i>.safetensors
                     /manifest.json        the parts and their sizes; a folder without one is no cut
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.run.record import Record, RecordDamaged, decode, encode
from app.run.storage import Store

_log = logging.getLogger(__name__)

FOLDER = "cuts/"
MANIFEST = "manifest.json"
SYNCER = "syncer"
LEDGER = "ledger.json"
SUFFIX = ".safetensors"
_NAME = re.compile(rf"{FOLDER}(\d{{6,}}-\d{{6,}})/[^/]+")


@dataclass(frozen=True)
class Part:
    """One part as it was saved."""

    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def name_of(id: tuple[int, int]) -> str:
    """The name of a cut, by the epoch that made it and its number; of two, the newer one sorts last."""
    return f"{id[0]:06d}-{id[1]:06d}"


class Cuts:
    """The cuts in one store (`<run.dir>/checkpoints`)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, cut: str, part: str, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Save a part; tensors of any dtype and device. Raises OSError."""
        record = Record(1, 1, part, False, dict(meta), dict(tensors))
        self._store.write(f"{FOLDER}{cut}/{part}{SUFFIX}", encode(record))

    def complete(self, cut: str, learners: Sequence[str], keep: int) -> None:
        """Every part is there: it is a cut from now on, and of the older ones `keep` − 1 stay. Raises OSError."""
        files = [f"{part}{SUFFIX}" for part in (SYNCER, *learners)]
        sizes = {file: self._store.size(f"{FOLDER}{cut}/{file}") for file in (*files, LEDGER)}
        manifest = {"learners": sorted(learners), "bytes": sizes}
        self._store.write(f"{FOLDER}{cut}/{MANIFEST}", json.dumps(manifest).encode())
        kept = self._whole()[-keep:]
        for name, folder in self._files():
            if folder <= cut and folder not in kept:
                self._store.delete(name)

    def part(self, cut: str, part: str) -> Part:
        """A part that was saved. Raises FileNotFoundError, RecordDamaged, OSError."""
        record = decode(self._store.read(f"{FOLDER}{cut}/{part}{SUFFIX}"))
        return Part(record.meta, record.tensors)

    def ledger(self, cut: str) -> bytes:
        """The ledger's part. Raises OSError, and RecordDamaged when it is no JSON."""
        data = self._store.read(f"{FOLDER}{cut}/{LEDGER}")
        try:
            json.loads(data)
        except ValueError as error:
            raise RecordDamaged(str(error)) from error
        return data

    def learners(self, cut: str) -> list[str]:
        """Those that have a part in it. Raises OSError, and RecordDamaged when the manifest is none."""
        return self._manifest(cut)[0]

    def _manifest(self, cut: str) -> tuple[list[str], dict[str, int]]:
        """Learners, and bytes of each file."""
        try:
            found = json.loads(self._store.text(f"{FOLDER}{cut}/{MANIFEST}"))
            learners, sizes = [str(learner) for learner in found["learners"]], dict(found["bytes"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordDamaged(f"{MANIFEST}: {error}") from error
        return learners, sizes

    def newest(self) -> str | None:
        """The newest cut that is whole, None when there is none. Damaged ones are warned about.

        Syncer's and ledger's parts are read, of the learners' the size is looked at: each checks its own.
        """
        for cut in reversed(self._whole()):
            try:
                for file, size in self._manifest(cut)[1].items():
                    if self._store.size(f"{FOLDER}{cut}/{file}") != size:
                        raise RecordDamaged(f"{file} has another size than it was saved with")
                self.part(cut, SYNCER)
                self.ledger(cut)
            except (RecordDamaged, OSError) as error:
                _log.warning("cut %s is damaged and left out: %s", cut, error)
                continue
            return cut
        return None

    def _whole(self) -> list[str]:
        """Cuts with a manifest, oldest first."""
        return [folder for name, folder in self._files() if name.endswith(f"/{MANIFEST}")]

    def _files(self) -> list[tuple[str, str]]:
        """Names of all files of cuts, and the cut of each, oldest first. What is named otherwise is none of ours."""
        found = ((name, _NAME.fullmatch(name)) for name in self._store.names(FOLDER))
        return [(name, match[1]) for name, match in found if match]
