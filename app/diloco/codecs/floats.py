"""Codecs without blocks: the whole fp32 number, or its upper half."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from app.diloco.codecs.base import Codec
from app.diloco.messages import Payload


class Fp32(Codec):
    """All 32 bits: lossless."""

    name = "fp32"

    def nbytes(self, n: int) -> int:
        """Four bytes an element."""
        return 4 * n

    def _encode(self, x: Tensor) -> Payload:
        return x.numpy().view(np.uint8).copy()

    def _decode(self, payload: Payload, n: int) -> Tensor:
        out = np.empty(n, np.float32)
        out.view(np.uint8)[:] = payload
        return torch.from_numpy(out)


class Bf16(Codec):
    """The upper 16 bits, rounded to nearest, ties to even. Beyond 3.39e38 it rounds to Inf."""

    name = "bf16"

    def nbytes(self, n: int) -> int:
        """Two bytes an element."""
        return 2 * n

    def _encode(self, x: Tensor) -> Payload:
        payload = np.empty(self.nbytes(x.numel()), np.uint8)
        # numpy has no bfloat16: torch writes its bits into the memory of an int16 array.
        torch.from_numpy(payload.view(np.int16)).view(torch.bfloat16).copy_(x)
        return payload

    def _decode(self, payload: Payload, n: int) -> Tensor:
        out = np.empty(n, np.uint32)
        np.left_shift(payload.view(np.uint16), 16, out=out, dtype=np.uint32)
        return torch.from_numpy(out.view(np.float32))
