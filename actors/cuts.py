"""The syncer's part in consistent cuts: it begins them, saves its own state, and declares them whole."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayError

from actors.consumption import Consumption
from actors.spec import LEDGER, RunSpec
from app.diloco.durable import Durable
from app.diloco.events import Event, Mark
from app.diloco.messages import CutId
from app.run.cuts import SYNCER, Cuts, name_of
from app.run.storage import open_store

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0


class CutMaker:
    """Makes a cut now and then; one at a time. What fails costs that cut and nothing else."""

    def __init__(
        self,
        spec: RunSpec,
        feed: Callable[[Event], None],
        note: Callable[..., None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        consumption: Consumption,
    ):
        """`feed` takes events for the protocol, `note` for the tape, `spawn` starts what takes longer."""
        self._spec, self._feed, self._note, self._spawn = spec, feed, note, spawn
        self._consumption = consumption
        self._cuts = Cuts(open_store(spec.checkpoints))
        self._numbers = itertools.count(1)
        """An epoch is of one process, so nothing that others have made has such a name."""
        self._one = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Make a cut every `checkpoint.full_every_s` seconds, for ever."""
        config = self._spec.config.checkpoint
        while True:
            await asyncio.sleep(config.full_every_s)
            await self.make(config.full_deadline_s)

    async def make(self, deadline_s: float) -> None:
        """Make a cut, once the one that is being made is over; this one is whole or given up when this returns.

        What the ledger must not hear of belongs to one cut at a time.
        """
        async with self._one:
            self._over.clear()
            self._feed(Mark(next(self._numbers), deadline_s))
            await self._over.wait()

    async def quiet(self) -> None:
        """Wait until no cut is being made."""
        async with self._one:
            pass

    def begun(self, id: CutId, state: Durable) -> None:
        """`state` is the syncer's part. What the ledger hears from now on belongs to no cut, so it hears it later."""
        self._consumption.hold()
        write = asyncio.to_thread(self._cuts.write, name_of(id), SYNCER, state.meta, state.tensors)
        self._writing = asyncio.get_running_loop().create_task(write)

    def done(self, id: CutId, learners: dict[str, int]) -> None:
        """All learners have saved their part."""
        self._spawn(self._complete(id, learners))

    def given_up(self, id: CutId, why: str) -> None:
        """There will be no such cut."""
        self._consumption.let_go()
        self._over.set()
        self._note("cut_given_up", cut=name_of(id), why=why)

    async def _complete(self, id: CutId, learners: dict[str, int]) -> None:
        assert self._writing is not None  # it was begun
        cut = name_of(id)
        try:
            await self._writing
            ledger = await asyncio.to_thread(ray.get_actor, LEDGER, self._spec.namespace)
            await asyncio.wait_for(ledger.capture.remote(cut), CALL_TIMEOUT_S)
            keep = self._spec.config.checkpoint.keep
            await asyncio.to_thread(self._cuts.complete, cut, list(learners), keep)
        except (OSError, RayError, ValueError, TimeoutError) as error:
            self.given_up(id, str(error))
            return
        self._consumption.let_go()
        self._over.set()
        self._note("cut", cut=cut, learners=learners)
