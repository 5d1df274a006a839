"""Where the learners of a data-parallel run meet to form a group. Its state lasts as long as a meeting: a restart of it
costs nothing but that they announce themselves again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from actors.service import Whereabouts, whereabouts
from app.learning.gathering import Formation, Gathering, Guest

PARK_S = 0.5
"""A guest that waits is answered after this long, so that one that left is known not to be there."""
PATIENCE_S = 8 * PARK_S
SETTLE_S = 2 * PARK_S
"""An elastic group forms when nobody else has come for so long."""


class Rendezvous:
    """The door to the group. All methods are safe to call twice."""

    def __init__(self, members: Sequence[str], elastic: bool):
        settle_s = SETTLE_S if elastic else None
        self._gathering = Gathering(members, PATIENCE_S, tag=uuid.uuid4().hex, settle_s=settle_s)
        self._news = asyncio.Condition()

    async def arrive(self, guest: Guest) -> Formation | None:
        """This guest's place in a group; None while there is none: it asks again."""
        deadline = time.monotonic() + PARK_S
        while (place := self._gathering.arrive(guest, time.monotonic())) is None:
            async with self._news:
                try:
                    await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())
                except TimeoutError:
                    return None
        async with self._news:
            self._news.notify_all()
        return place

    async def wanted(self, generation: str) -> bool:
        """Whether the members of this group are to come and meet again."""
        return self._gathering.wanted(generation, time.monotonic())

    async def where(self) -> Whereabouts:
        """Node and process."""
        return whereabouts()
