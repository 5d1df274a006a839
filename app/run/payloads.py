"""What replay needs beside the tape: version 0, and every contribution as it came, a file each (`tape.payloads`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from app.run.record import Record, decode, encode
from app.run.storage import Store

FIRST = "version-0.safetensors"


class PayloadStore:
    """The folder `payloads/` of a run."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def keep_first(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the state before the first merge."""
        self._store.write(FIRST, encode(Record(1, 1, "first", False, dict(meta), dict(tensors))))

    def first(self) -> Record:
        """That state. Raises FileNotFoundError, RecordDamaged."""
        return decode(self._store.read(FIRST))

    def keep(self, epoch: int, round_id: int, learner: str, incarnation: int, payload: bytes) -> None:
        """Keep the payload of a contribution, unless one of that name is there. Raises OSError."""
        with suppress(FileExistsError):
            self._store.create(_name(epoch, round_id, learner, incarnation), payload)

    def payload(self, epoch: int, round_id: int, learner: str, incarnation: int) -> bytes:
        """One that was kept. Raises FileNotFoundError."""
        return self._store.read(_name(epoch, round_id, learner, incarnation))


def _name(epoch: int, round_id: int, learner: str, incarnation: int) -> str:
    return f"{epoch}/{round_id:09d}-{learner}-{incarnation}.payload"
