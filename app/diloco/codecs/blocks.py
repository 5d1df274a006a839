"""int8, int4 and fp4: blocks of a vector share a scale, and each element is a small code times that scale.

A block of B elements (the last one may be shorter) has one scale s, stored as bf16. An element x is decoded as q·s:

    int8  q = −127 … 127                               s = bf16(max|x| / 127)
    int4  q = −7 … 7                                   s = bf16(max|x| / 7)
    fp4   q = 0, ±1, ±2, ±4, ±8, ±16, ±32, ±64 (E3M0)  s = bf16(max|x| / 64)

q is the value nearest to x/s, computed as x · (1/s) in fp32. A tie goes to the even integer, in fp4 to the even
exponent code. What is above the largest q, by the rounding of s, becomes that q: |x − q·s| ≤ s/2 holds for the
integers all the same, as bf16 errs by 2⁻⁹ at most and q < 256.

Why a bf16 scale. q has at most 7 significant bits and s has 8, so q·s is exact in fp32: every device, and every way
to compute it, also fused with the addition that follows, gives the same bits. A power-of-two scale would too, and
would take 1 byte less for a block, but wastes up to half of the codes' range. Relative L2 error at B = 64, with
Gaussian and with heavy-tailed elements (Student's t with 3 degrees of freedom):

                        int8            int4            fp4
    bf16            0.0060 0.0111    0.108 0.180    0.188 0.156
    fp32            0.0059 0.0111    0.108 0.180
    power of two    0.0089 0.0166    0.150 0.252    0.195 0.196

Why 64 elements in a block: a scale adds 1/4 bit to each. 128 would save 3% of the bytes of int4 for 9 to 24% more
error, 32 would add 6% for 10 to 20% less.

Special values. A block whose scale would be below 2⁻¹²⁶ has scale 0 and decodes to zeros: what is lost is below
127·2⁻¹²⁶, and no decoded number is subnormal, so devices that flush those agree. A block with NaN or Inf has scale
NaN and decodes to NaN throughout. The scale of fp4 is at most 1.99·2¹²¹, so that 64·s is finite. −0 becomes 0, but in
fp4 a negative element that rounds to zero is −0. encode(decode(p)) = p for every p that encode has made.

Bytes: the scales of all blocks, then the codes of all blocks. int8 is two's complement. With 4 bits, byte j of a block
of m elements holds element j in its low half and element ⌈m/2⌉ + j in its high half (0 where there is none): halves of
a block meet, not neighbours, so that a vector instruction packs many at once. int4 is two's complement, fp4 is sign,
then three bits e, 0 or 2^(e−1).

Source: blockwise scales, 8-bit optimizers (arXiv 2110.02861); E3M0, Streaming DiLoCo (2501.18512), section 3.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from app.diloco.codecs.base import Codec
from app.diloco.codecs.kernels import load_kernels
from app.diloco.messages import Payload
from app.diloco.settings import CODEC_BLOCKS

BLOCK_CODECS = ("int8", "int4", "fp4")
SCALE_BYTES = 2


class BlockCodec(Codec):
    """int8, int4 or fp4 with blocks of `block` elements.

    Payloads of another block size have another length, unless the whole vector fits into one block of either size;
    then they are the same. So decoding with a wrong size is refused.
    """

    def __init__(self, name: str, block: int) -> None:
        if block not in CODEC_BLOCKS:
            raise ValueError(f"codec {name} has blocks of {', '.join(map(str, CODEC_BLOCKS))} elements, not {block}")
        self.name = name
        self.block = block
        self._kernels = load_kernels(name)
        self._codes_a_byte = 1 if name == "int8" else 2

    def nbytes(self, n: int) -> int:
        """Two bytes a block, and one or half a byte an element."""
        return SCALE_BYTES * self._blocks(n) + -(-n // self._codes_a_byte)

    def _blocks(self, n: int) -> int:
        return -(-n // self.block)

    def _encode(self, x: Tensor) -> Payload:
        payload = np.empty(self.nbytes(x.numel()), np.uint8)
        split = SCALE_BYTES * self._blocks(x.numel())
        self._kernels.encode(x.numpy(), payload[:split].view(np.uint16), payload[split:], self.block)
        return payload

    def _decode(self, payload: Payload, n: int) -> Tensor:
        split = SCALE_BYTES * self._blocks(n)
        scales = payload[:split].copy().view(np.uint16)  # the payload may begin at an odd address
        out = np.empty(n, np.float32)
        self._kernels.decode(scales, payload[split:], out, self.block)
        return torch.from_numpy(out)
