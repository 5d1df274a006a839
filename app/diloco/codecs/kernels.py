"""The inner loops of the block codecs: compiled where numba is installed, else in numpy. Both give the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Fp32s = npt.NDArray[np.float32]
Scales = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """How one codec encodes and decodes. Arrays are contiguous; x and out are [n], scales [blocks] as bf16 bits.

    They hold no lock while they work, use one thread, and write all of what they are given to write to.
    """

    encode: Callable[[Fp32s, Scales, Codes, int], None]
    """encode(x, scales, codes, block) writes scales and codes."""
    decode: Callable[[Scales, Codes, Fp32s, int], None]
    """decode(scales, codes, out, block) writes out."""


@cache
def load_kernels(name: str) -> Kernels:
    """The kernels of int8, int4 or fp4.

    numba is imported and compiles here, not before: it takes a second or two unless its cache has them already.
    """
    try:
        from app.diloco.codecs import compiled

        return compiled.kernels(name)
    except Exception as error:  # not installed, not for this numpy, or it can't compile here: numpy gives the same bits
        from app.diloco.codecs import plain

        _log.warning("%s is encoded and decoded by numpy, many times slower: %r", name, error)
        return plain.kernels(name)
