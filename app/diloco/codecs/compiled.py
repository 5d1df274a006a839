"""The kernels of the block codecs, compiled by numba to vector instructions. See `blocks.py`.

Each block is read twice, for its largest element and to encode it, the second time from the cache. What keeps the
loops free of branches and of scalar code:
- indexes are unsigned, as numba tests a signed one for being negative;
- the largest magnitude is found on the bits, in order as integers: unlike max of floats this may be reordered, and
  NaN and Inf come out largest;
- x + 1.5·2²³ rounds x to the nearest integer, ties to even, and has it in its lowest bits;
- arithmetic of int32 is narrowed again by I32(...), as numba widens it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from app.diloco.codecs.kernels import Kernels

_log = logging.getLogger(__name__)

F32, I32, U8, U64 = np.float32, np.int32, np.uint8, np.uint64
# All constants stand here, as numba's cache only sees changes of this file.
TOP_INT8, TOP_INT4, TOP_FP4 = F32(127), F32(7), F32(64)
ROUND = F32(1.5 * 2**23)
MAGNITUDE = I32(0x7FFFFFFF)
INFINITE = I32(0x7F800000)
NAN_SCALE = I32(0x7FC0)
SMALLEST_SCALE = I32(0x80)  # bf16 bits of 2⁻¹²⁶, the smallest normal number
LARGEST_SCALE_INT = I32(0x7F7F)  # of bf16
LARGEST_SCALE_FP4 = I32(0x7C7F)  # 64 times that is finite
HALF = I32(0x3F000000)  # fp32 bits of 0.5

_read = {dtype: types.Array(dtype, 1, "C", readonly=True) for dtype in (types.float32, types.uint16, types.uint8)}
_write = {dtype: types.Array(dtype, 1, "C") for dtype in _read}
ENCODE = types.void(_read[types.float32], _write[types.uint16], _write[types.uint8], types.intp)
DECODE = types.void(_read[types.uint16], _read[types.uint8], _write[types.float32], types.intp)


def kernels(name: str) -> Kernels:
    """Compile the kernels of int8, int4 or fp4, or take them from numba's cache."""
    encode, decode = {
        "int8": (_encode_int8, _decode_int8),
        "int4": (_encode_int4, _decode_int4),
        "fp4": (_encode_fp4, _decode_fp4),
    }[name]
    return Kernels(_compile(ENCODE, encode), _compile(DECODE, decode))


def _compile(signature: Any, function: Callable[..., None]) -> Callable[..., None]:
    """Compiled for these types; kept beside the source, or in the user's cache folder where that can't be written."""
    try:
        return njit(signature, cache=True, nogil=True)(function)
    except Exception as error:  # whatever a cache of damaged files, a full disk or no folder to write to raises
        _log.warning("%s is compiled without numba's cache: %r", function.__name__, error)
        return njit(signature, nogil=True)(function)


@njit(inline="always")
def _bounds(b, block, n):  # type: ignore[no-untyped-def]
    """First and last + 1 element of block b."""
    return U64(b * block), U64(min((b + 1) * block, n))


@njit
def _scale(bits, start, stop, top, largest):  # type: ignore[no-untyped-def]
    """The bf16 bits of a block's scale, at most `largest`; 0 where it would be subnormal, NaN for NaN and Inf."""
    size = I32(0)
    for i in range(start, stop):
        size = max(size, I32(bits[i] & MAGNITUDE))
    if size >= INFINITE:
        return NAN_SCALE
    exact = I32(F32(_float_of(size) / top).view(I32))
    scale = I32(I32(exact + I32(0x7FFF) + I32(I32(exact >> I32(16)) & I32(1))) >> I32(16))
    return min(scale, largest) if scale >= SMALLEST_SCALE else I32(0)


@njit
def _float_of(bits):  # type: ignore[no-untyped-def]
    return I32(bits).view(F32)  # numba views numbers only right where they got their type


@njit
def _fp32(scale):  # type: ignore[no-untyped-def]
    return _float_of(I32(I32(scale) << I32(16)))


@njit
def _inverse(scale):  # type: ignore[no-untyped-def]
    return F32(F32(1) / _fp32(scale)) if scale > I32(0) else F32(0)


@njit
def _integer(x, inverse):  # type: ignore[no-untyped-def]
    """The nearest integer to x · inverse, in the low bits."""
    return I32(F32(F32(x * inverse) + ROUND).view(I32))


@njit
def _e3m0(x, inverse):  # type: ignore[no-untyped-def]
    """Sign (bit 3) and exponent code of the nearest of 0, ±1, ±2, … ±64 to x · inverse."""
    bits = I32(F32(x * inverse).view(I32))
    size = I32(bits & MAGNITUDE)
    rounded = I32(I32(size + I32(0x3FFFFF)) + I32(I32(size >> I32(23)) & I32(1)))
    exponent = I32(I32(rounded >> I32(23)) - I32(126))
    code = min(max(exponent, I32(size > HALF)), I32(7))  # between 0 and 1 the nearest is 1 above 0.5
    return I32(code | I32(I32(bits >> I32(28)) & I32(8)))


def _encode_int8(x, scales, codes, block):  # type: ignore[no-untyped-def]
    bits = x.view(np.int32)
    for b in range(scales.size):
        start, stop = _bounds(b, block, x.size)
        scale = _scale(bits, start, stop, TOP_INT8, LARGEST_SCALE_INT)
        scales[b] = scale
        if scale == NAN_SCALE:
            codes[start:stop] = 0
            continue
        inverse = _inverse(scale)
        for i in range(start, stop):
            codes[i] = U8(_integer(x[i], inverse))


def _encode_int4(x, scales, codes, block):  # type: ignore[no-untyped-def]
    bits = x.view(np.int32)
    for b in range(scales.size):
        start, stop = _bounds(b, block, x.size)
        half = U64((stop - start + U64(1)) >> U64(1))
        first, both = U64(start >> U64(1)), U64(stop - start - half)
        scale = _scale(bits, start, stop, TOP_INT4, LARGEST_SCALE_INT)
        scales[b] = scale
        if scale == NAN_SCALE:
            codes[first : first + half] = 0
            continue
        inverse = _inverse(scale)
        for j in range(both):
            low, high = _integer(x[start + j], inverse), _integer(x[start + half + j], inverse)
            codes[first + j] = U8(I32(low & I32(15)) | I32(high << I32(4)))
        if both < half:
            codes[first + both] = U8(_integer(x[start + both], inverse) & I32(15))


def _encode_fp4(x, scales, codes, block):  # type: ignore[no-untyped-def]
    bits = x.view(np.int32)
    for b in range(scales.size):
        start, stop = _bounds(b, block, x.size)
        half = U64((stop - start + U64(1)) >> U64(1))
        first, both = U64(start >> U64(1)), U64(stop - start - half)
        scale = _scale(bits, start, stop, TOP_FP4, LARGEST_SCALE_FP4)
        scales[b] = scale
        if scale == NAN_SCALE:
            codes[first : first + half] = 0
            continue
        inverse = _inverse(scale)
        for j in range(both):
            low, high = _e3m0(x[start + j], inverse), _e3m0(x[start + half + j], inverse)
            codes[first + j] = U8(low | I32(high << I32(4)))
        if both < half:
            codes[first + both] = U8(_e3m0(x[start + both], inverse))


def _decode_int8(scales, codes, out, block):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start, stop = _bounds(b, block, out.size)
        scale = _fp32(scales[b])
        for i in range(start, stop):
            out[i] = F32(np.int8(codes[i])) * scale


def _decode_int4(scales, codes, out, block):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start, stop = _bounds(b, block, out.size)
        half = U64((stop - start + U64(1)) >> U64(1))
        first, both = U64(start >> U64(1)), U64(stop - start - half)
        scale = _fp32(scales[b])
        for j in range(half):
            out[start + j] = F32(I32(I32(I32(codes[first + j]) << I32(28)) >> I32(28))) * scale
        for j in range(both):
            out[start + half + j] = F32(I32(I32(I32(codes[first + j]) << I32(24)) >> I32(28))) * scale


@njit
def _e3m0_value(code):  # type: ignore[no-untyped-def]
    """0, ±1, ±2, … ±64, with −0 where the sign of zero is set."""
    size = F32(I32(I32(I32(1) << I32(code & I32(7))) >> I32(1)))
    return _float_of(I32(I32(F32(size).view(I32)) | I32(I32(code & I32(8)) << I32(28))))


def _decode_fp4(scales, codes, out, block):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start, stop = _bounds(b, block, out.size)
        half = U64((stop - start + U64(1)) >> U64(1))
        first, both = U64(start >> U64(1)), U64(stop - start - half)
        scale = _fp32(scales[b])
        for j in range(half):
            out[start + j] = _e3m0_value(I32(codes[first + j])) * scale
        for j in range(both):
            out[start + half + j] = _e3m0_value(I32(I32(codes[first + j]) >> I32(4))) * scale
