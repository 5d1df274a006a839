"""The last R versions of one fragment: which bases a contribution may have, and what led from one to the next.

Values are not kept: a contribution is a difference from its base, so a merge needs none but the newest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from app.diloco.messages import Payload


@dataclass(frozen=True)
class _Entry:
    version: int
    change: Payload | None


class Ring:
    """Version numbers of one fragment, newest last, each with a private copy of the encoded change that led to it.

    An older version leaves when the ring is full (`capacity` is R).
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a ring holds at least 1 version, got {capacity}")
        self._entries: deque[_Entry] = deque(maxlen=capacity)

    def push(self, version: int, change: Payload | None) -> None:
        """Add the next version; the first one pushed may have any number.

        `change` is the encoded change from version − 1, None when there is none (version 0, or a restored
        one). Raises ValueError unless `version` is newest + 1.
        """
        if self._entries and version != self.newest + 1:
            raise ValueError(f"version {version} cannot follow version {self.newest}")
        self._entries.append(_Entry(version, None if change is None else np.array(change, copy=True)))

    def __contains__(self, version: int) -> bool:
        """Whether that version is still held."""
        return bool(self._entries) and self.oldest <= version <= self.newest

    def changes(self, after_version: int) -> list[Payload] | None:
        """The encoded changes of versions after_version + 1 to newest, in order; [] for the newest itself.

        None when one of them has left the ring, was never known, or when `after_version` is not a version
        yet.
        """
        if not self._entries or not self.oldest - 1 <= after_version <= self.newest:
            return None
        later = [entry.change for entry in self._entries if entry.version > after_version]
        known = [change for change in later if change is not None]
        return known if len(known) == len(later) else None

    @property
    def newest(self) -> int:
        """The newest version. Raises IndexError while the ring is empty."""
        return self._entries[-1].version

    @property
    def oldest(self) -> int:
        """The oldest version still held. Raises IndexError while the ring is empty."""
        return self._entries[0].version
