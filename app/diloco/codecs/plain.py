"""The kernels of the block codecs in numpy: for machines without numba, and for tests. See `blocks.py`.

They make several temporary copies of the vector; the compiled ones make none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from app.diloco.codecs.kernels import Codes, Fp32s, Kernels, Scales

Ints = npt.NDArray[np.int32]
Quantize = Callable[[Fp32s], Ints]

# Largest value of a code, and largest bits of a bf16 scale.
INT8, INT4, FP4 = (127, 0x7F7F), (7, 0x7F7F), (64, 0x7C7F)


def kernels(name: str) -> Kernels:
    """The kernels of int8, int4 or fp4."""
    return {
        "int8": Kernels(_encode_int8, _decode_int8),
        "int4": Kernels(_encode_int4, _decode_int4),
        "fp4": Kernels(_encode_fp4, _decode_fp4),
    }[name]


def _encode_int8(x: Fp32s, scales: Scales, codes: Codes, block: int) -> None:
    for part, rows in _parts(x.size, block):
        scale, y = _scaled(x[part].reshape(rows, -1), *INT8)
        scales[part.start // block :][:rows] = scale
        codes[part] = _nearest_integer(y).astype(np.uint8).ravel()


def _encode_int4(x: Fp32s, scales: Scales, codes: Codes, block: int) -> None:
    _encode_4bit(x, scales, codes, block, INT4, _nearest_integer)


def _encode_fp4(x: Fp32s, scales: Scales, codes: Codes, block: int) -> None:
    _encode_4bit(x, scales, codes, block, FP4, _nearest_e3m0)


def _encode_4bit(
    x: Fp32s, scales: Scales, codes: Codes, block: int, limits: tuple[int, int], quantize: Quantize
) -> None:
    for part, rows in _parts(x.size, block):
        scale, y = _scaled(x[part].reshape(rows, -1), *limits)
        scales[part.start // block :][:rows] = scale
        q = quantize(y) & 15
        half = -(-q.shape[1] // 2)
        packed = q[:, :half].copy()
        packed[:, : q.shape[1] - half] |= q[:, half:] << 4
        codes[part.start // 2 :][: packed.size] = packed.ravel().astype(np.uint8)


def _parts(n: int, block: int) -> list[tuple[slice, int]]:
    """The whole blocks, and the short last one: where they are in the vector, and how many."""
    whole = n // block * block
    parts = [(slice(0, whole), whole // block), (slice(whole, n), 1)]
    return [(part, rows) for part, rows in parts if part.stop > part.start]


def _scaled(x: Fp32s, top: int, largest_scale: int) -> tuple[Scales, Fp32s]:
    """The bf16 scales of blocks [blocks, elements], and the blocks divided by them (0 where the scale is 0 or NaN)."""
    largest = (x.view(np.int32) & 0x7FFFFFFF).max(1, keepdims=True)
    broken = largest >= 0x7F800000
    with np.errstate(all="ignore"):
        bits = (largest.view(np.float32) / np.float32(top)).view(np.int32)
        scale = np.minimum((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, largest_scale)
        scale[scale < 0x80] = 0  # subnormal
        inverse = np.float32(1) / (scale << 16).view(np.float32)
        inverse[(scale == 0) | broken] = 0
        scale[broken] = 0x7FC0
        y = np.where(broken, np.float32(0), x) * inverse
    return scale.ravel().astype(np.uint16), y


def _nearest_integer(y: Fp32s) -> Ints:
    return np.rint(y).astype(np.int32)


def _nearest_e3m0(y: Fp32s) -> Ints:
    """Sign and exponent code of the nearest of 0, ±1, ±2, … ±64; bits 3 and 2 to 0."""
    bits = y.view(np.int32)
    size = bits & 0x7FFFFFFF
    exponent = ((size + 0x3FFFFF + ((size >> 23) & 1)) >> 23) - 126  # rounded as if it were an integer
    exponent = np.clip(exponent, size > 0x3F000000, 7)  # between 0 and 1 the nearest is 1 above 0.5
    return exponent.astype(np.int32) | ((bits >> 28) & 8)


def _decode_int8(scales: Scales, codes: Codes, out: Fp32s, block: int) -> None:
    for part, rows in _parts(out.size, block):
        _multiply(scales, codes[part].view(np.int8).reshape(rows, -1), out, part, block)


def _decode_int4(scales: Scales, codes: Codes, out: Fp32s, block: int) -> None:
    for part, rows in _parts(out.size, block):
        q = _unpacked(codes, part, rows)
        _multiply(scales, (q ^ 8) - 8, out, part, block)


def _decode_fp4(scales: Scales, codes: Codes, out: Fp32s, block: int) -> None:
    values = np.array([0, 1, 2, 4, 8, 16, 32, 64], np.float32)
    table = np.concatenate([values, -values])
    for part, rows in _parts(out.size, block):
        _multiply(scales, table[_unpacked(codes, part, rows)], out, part, block)


def _unpacked(codes: Codes, part: slice, rows: int) -> Ints:
    """The 4-bit codes of blocks as [blocks, elements]."""
    elements = (part.stop - part.start) // rows
    half = -(-elements // 2)
    packed = codes[part.start // 2 :][: rows * half].reshape(rows, half).astype(np.int32)
    return np.concatenate([packed & 15, (packed >> 4)[:, : elements - half]], axis=1)


def _multiply(scales: Scales, q: npt.NDArray[np.generic], out: Fp32s, part: slice, block: int) -> None:
    scale = (scales[part.start // block :][: len(q)].astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        out[part] = (q.astype(np.float32) * scale[:, None]).ravel()
