"""What the journal says of every incarnation's samples, told to the data ledger until it knows.

Only what is durable is told, so a syncer that dies never takes back what the ledger was told: which samples are used
for good, and which incarnations have ended and give back the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError

from actors.spec import LEDGER, RunSpec
from app.diloco.messages import Consumed
from app.learning.leases import Counts

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
RETRY_S = 1.0


class Consumption:
    """Tells the newest state; what came before it is in it."""

    def __init__(self, spec: RunSpec, known: Callable[[Sequence[Consumed]], None]):
        """`known` is called with the ended incarnations that the ledger knows of, durably."""
        self._namespace, self._known = spec.namespace, known
        self._newest: Sequence[Consumed] = ()
        self._held: Sequence[Consumed] | None = None
        self._holding = False
        self._told = asyncio.Event()
        self._news = asyncio.Event()
        self.counts: Counts | None = None
        """The ledger's own account when it was told last."""

    def tell(self, consumed: Sequence[Consumed]) -> None:
        """This is durable."""
        if self._holding:
            self._held = consumed
            return
        self._newest = consumed
        self._told.clear()
        self._news.set()

    def hold(self) -> None:
        """Tell nothing new until `let_go`: a consistent cut is made, to which it would not belong."""
        self._holding = True

    def let_go(self) -> None:
        """Tell what was held back."""
        self._holding = False
        if self._held is not None:
            self.tell(self._held)
        self._held = None

    async def run(self) -> None:
        """Go on telling, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not await self._tell(self._newest):
                await asyncio.sleep(RETRY_S)
                self._news.set()
            elif not self._news.is_set():
                self._told.set()

    async def settled(self, wait_s: float) -> bool:
        """Wait until the ledger knows all, for so long at most; False while something is held back."""
        if self._holding:
            return False
        try:
            await asyncio.wait_for(self._told.wait(), wait_s)
        except TimeoutError:
            return False
        return True

    async def _tell(self, consumed: Sequence[Consumed]) -> bool:
        try:
            ledger = await asyncio.to_thread(ray.get_actor, LEDGER, self._namespace)
            counts = await asyncio.wait_for(ledger.consume.remote(consumed), CALL_TIMEOUT_S)
        except (RayError, ValueError, TimeoutError) as error:
            _log.info("ledger away: %s", error)
            return False
        if counts is None:
            return False
        self.counts = counts
        self._known([entry for entry in consumed if entry.ended])
        return True
