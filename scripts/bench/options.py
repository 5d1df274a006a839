"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def positive(text: str) -> int:
    """A whole number above 0. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: a whole number above 0 is needed")
    return int(text)


def names_among(allowed: Collection[str], otherwise: str) -> Callable[[str], list[str]]:
    """Reads names, separated by commas; of one that is not allowed the ArgumentTypeError says `otherwise`."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{','.join(unknown)}: {otherwise}")
        return names

    return read
