"""What crosses the network: fp32 vectors as contiguous bytes, and back.

Decoding gives the same bits on every machine (it runs on the CPU), so all who decode a change hold the same
value. Bytes are little-endian, as on every machine that torch supports.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from app.diloco.messages import Payload


class Codec(ABC):
    """One way to write an fp32 vector of n elements as bytes. Stateless: errors are carried by the caller."""

    name: str

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Length in bytes of the encoding of n elements."""

    @abstractmethod
    def _pack(self, x: Tensor) -> Tensor:
        """Encode a contiguous fp32 CPU vector [n] into a CPU tensor of nbytes(n) bytes."""

    @abstractmethod
    def _unpack(self, data: Payload, n: int) -> Tensor:
        """Decode a uint8 array [nbytes(n)] that the codec owns into fp32 [n]."""

    def encode(self, x: Tensor) -> Payload:
        """Encode a vector [n] as a new contiguous uint8 array [nbytes(n)] that shares no memory with `x`.

        Raises ValueError when `x` is not one-dimensional.
        """
        if x.dim() != 1:
            raise ValueError(f"a codec encodes flat vectors, got shape {tuple(x.shape)}")
        packed = self._pack(_fp32(x)).numpy().view(np.uint8)
        return np.array(packed, dtype=np.uint8, copy=True)

    def decode(self, payload: Payload, n: int) -> Tensor:
        """Decode into a new fp32 CPU vector [n] that shares no memory with the (maybe read-only) `payload`.

        Raises ValueError when `payload` is not a flat uint8 array of nbytes(n) bytes.
        """
        if payload.dtype != np.uint8 or payload.shape != (self.nbytes(n),):
            got = f"{payload.dtype} {list(payload.shape)}"
            raise ValueError(f"{self.name}: {n} elements take uint8 [{self.nbytes(n)}], got {got}")
        return self._unpack(np.array(payload, copy=True, order="C"), n)


class Fp32(Codec):
    """All 32 bits: lossless."""

    name = "fp32"

    def nbytes(self, n: int) -> int:
        """Four bytes an element."""
        return 4 * n

    def _pack(self, x: Tensor) -> Tensor:
        return x

    def _unpack(self, data: Payload, n: int) -> Tensor:  # noqa: ARG002
        return torch.from_numpy(data.view(np.float32))


class Bf16(Codec):
    """The upper 16 bits, rounded to nearest, ties to even. Beyond 3.39e38 it rounds to Inf."""

    name = "bf16"

    def nbytes(self, n: int) -> int:
        """Two bytes an element."""
        return 2 * n

    def _pack(self, x: Tensor) -> Tensor:
        # numpy has no bfloat16: hand over the same bits as int16.
        return x.to(torch.bfloat16).view(torch.int16)

    def _unpack(self, data: Payload, n: int) -> Tensor:  # noqa: ARG002
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).to(torch.float32)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16())}


def get_codec(name: str) -> Codec:
    """The codec of that name. Raises ValueError that names the allowed ones."""
    if name not in _CODECS:
        raise ValueError(f"unknown codec {name!r}, allowed: {', '.join(_CODECS)}")
    return _CODECS[name]


def check_finite(x: Tensor) -> None:
    """Raise ValueError when `x` holds NaN or Inf."""
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} elements are NaN or Inf")


def digest(x: Tensor) -> str:
    """SHA-256 of the fp32 bytes of `x`, in hex: equal for equal bits. Most CPUs have instructions for it."""
    return hashlib.sha256(_fp32(x).numpy().data).hexdigest()


def _fp32(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float32).contiguous()
