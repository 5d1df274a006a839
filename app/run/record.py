"""One journal record as bytes: a safetensors file whose metadata carries JSON and a checksum."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch


class RecordDamaged(ValueError):
    """These bytes are not a whole record: cut short, garbled, or of another kind."""


@dataclass(frozen=True)
class Record:
    """Named tensors with metadata, at a place in the journal."""

    seq: int
    """Place in the journal, from 1."""
    epoch: int
    """The writer's epoch."""
    writer: str
    """Unique name of the writing process' journal."""
    claim: bool
    """True for the record by which a writer claims its epoch."""
    meta: dict[str, Any]
    """What the caller gave."""
    tensors: dict[str, torch.Tensor]
    """What the caller gave, on the CPU."""


def encode(record: Record) -> bytes:
    """The record as safetensors bytes. The checksum is SHA-256 over metadata and all tensors by name.

    Raises:
        ValueError: metadata that JSON has no word for (NaN, for example).
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in record.tensors.items()}
    envelope = json.dumps(
        {
            "seq": record.seq,
            "epoch": record.epoch,
            "writer": record.writer,
            "claim": record.claim,
            "meta": record.meta,
        },
        allow_nan=False,
    )
    checksum = _checksum(envelope, tensors)
    return safetensors.torch.save(tensors, metadata={"record": envelope, "checksum": checksum})


def decode(data: bytes) -> Record:
    """The record in these bytes; tensors are copies.

    Raises:
        RecordDamaged: anything about the bytes is not as `encode` made it.
    """
    try:
        header_size = struct.unpack("<Q", data[:8])[0]
        metadata = json.loads(data[8 : 8 + header_size])["__metadata__"]
        tensors = safetensors.torch.load(data)
        envelope, checksum = metadata["record"], metadata["checksum"]
        if _checksum(envelope, tensors) != checksum:
            raise RecordDamaged("the checksum does not match")
        return Record(**json.loads(envelope), tensors=tensors)
    except RecordDamaged:
        raise
    except Exception as error:  # whatever garbled bytes make of the parsers
        raise RecordDamaged(f"not a record: {error}") from error


def _checksum(envelope: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(envelope.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
