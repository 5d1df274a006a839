"""The interface of a codec: fp32 vectors as contiguous bytes, and back.

Decoding gives the same bits on every machine, so all who decode a change hold the same value. Bytes are
little-endian, as on every machine that torch supports. Results lie in memory of numpy's, which asks the system for
huge pages: to fill a new 64 MB vector of torch's own takes several times as long, page fault by page fault.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from app.diloco.messages import Payload


class Codec(ABC):
    """One way to write an fp32 vector of n elements as bytes. Stateless: errors are carried by the caller.

    NaN and Inf are encoded too, into bytes whose decoding has NaN or Inf: a learner whose parameters broke does not
    die of it, and the syncer refuses what it sent.
    """

    name: str

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Length in bytes of the encoding of n elements."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Payload:
        """Encode a contiguous fp32 CPU vector [n] into a new array [nbytes(n)]."""

    @abstractmethod
    def _decode(self, payload: Payload, n: int) -> Tensor:
        """Decode a contiguous array [nbytes(n)], maybe read-only and unaligned, into a new fp32 [n]."""

    def encode(self, x: Tensor) -> Payload:
        """Encode a vector [n] as a new contiguous uint8 array [nbytes(n)] that shares no memory with `x`.

        Raises ValueError when `x` is not one-dimensional.
        """
        if x.dim() != 1:
            raise ValueError(f"a codec encodes flat vectors, got shape {tuple(x.shape)}")
        return self._encode(as_fp32(x))

    def decode(self, payload: Payload, n: int) -> Tensor:
        """Decode into a new fp32 CPU vector [n] that shares no memory with the (maybe read-only) `payload`.

        Raises ValueError when `payload` is not a flat uint8 array of nbytes(n) bytes. Bytes of that length are
        always decoded, garbage to garbage; NaN and Inf may be among it.
        """
        if payload.dtype != np.uint8 or payload.shape != (self.nbytes(n),):
            got = f"{payload.dtype} {list(payload.shape)}"
            raise ValueError(f"{self.name}: {n} elements take uint8 [{self.nbytes(n)}], got {got}")
        return self._decode(np.ascontiguousarray(payload), n)


def as_fp32(x: Tensor) -> Tensor:
    """`x` as a contiguous fp32 CPU tensor without gradient: itself where it is one."""
    return x.detach().to("cpu", torch.float32).contiguous()
