"""The compression figure that people know: what gzip makes of the same bytes."""

from __future__ import annotations

import gzip


def gzip_bits_per_byte(data: bytes) -> float:
    """Return the bits of `gzip -9` output for each byte of `data`. Raises ValueError when there is none."""
    if not data:
        raise ValueError("nothing to compress")
    return 8 * len(gzip.compress(data, compresslevel=9, mtime=0)) / len(data)
