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


class Rendezvous:
    """The door to the group. All methods are safe to call twice."""

    def __init__(self, members: Sequence[str]):
        self._gathering = Gathering(members, PATIENCE_S, tag=uuid.uuid4().hex)
        self._news = asyncio.Condition()

    async def arrive(self, guest: Guest) -> Formation | None:
        """This guest's place in a group of all; None when somebody is still missing: it asks again."""
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

    async def where(self) -> Whereabouts:
        """Node and process."""
        return whereabouts()
