"""Keeping freed memory in the process: an inner step allocates the same tensors again and again."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8  # of glibc's malloc.h
LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
KEEP = 512 * 1024 * 1024
GROW = 64 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep what is freed instead of giving it back to the kernel, which clears it each time.

    Without it every step on a CPU pays for hundreds of page faults. One arena, as the limits only hold for the main
    one. Returns False where there is no such malloc; nothing is lost then but the speed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {
        M_ARENA_MAX: 1,
        M_MMAP_THRESHOLD: LARGEST_MMAP_THRESHOLD,
        M_TRIM_THRESHOLD: KEEP,
        M_TOP_PAD: GROW,
    }
    return all(mallopt(name, value) == 1 for name, value in settings.items())
