"""Codecs by name, and the digest of a vector that crosses the network."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
from torch import Tensor

from app.diloco.codecs.base import Codec, as_fp32
from app.diloco.codecs.blocks import BLOCK_CODECS, BlockCodec
from app.diloco.codecs.floats import Bf16, Fp32
from app.diloco.messages import Payload
from app.diloco.settings import CODECS

__all__ = ["Codec", "digest", "get_codec"]


@cache
def get_codec(name: str, block: int | None = None) -> Codec:
    """The codec of that name; `block` is the elements that share a scale, for those that have blocks.

    Raises ValueError when there is none of that name, or when it has blocks and `block` is not a size they can have.
    """
    if name in BLOCK_CODECS:
        if block is None:
            raise ValueError(f"codec {name} needs a block size")
        return BlockCodec(name, block)
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}, allowed: {', '.join(CODECS)}")
    return Fp32() if name == "fp32" else Bf16()


def payload_digest(payload: Payload) -> str:
    """SHA-256 of an encoded value, in hex. Raises TypeError or ValueError for what is no array of bytes."""
    return hashlib.sha256(payload.view(np.uint8).data).hexdigest()


def digest(x: Tensor) -> str:
    """SHA-256 of the fp32 bytes of `x`, in hex: equal for equal bits. Most CPUs have instructions for it."""
    return hashlib.sha256(as_fp32(x).numpy().data).hexdigest()
