"""Carrying out what the protocol decides about values: merges, journal records, snapshots.

Arithmetic and disk have a thread each, so that the syncer's loop goes on answering. A merge counts when its record is
on the disk, and books and journal see merges in the same order.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from actors.spec import RunSpec
from app.diloco.durable import Durable, merge_record, whole_state
from app.diloco.events import Event, Published, PublishFailed, Record, Recorded, RecordFailed
from app.diloco.job import MergeJob
from app.diloco.messages import Consumed, Contribution
from app.diloco.protocol import Protocol
from app.diloco.shadow import Shadow
from app.run import tape
from app.run.following import Follower
from app.run.journal import Fenced, Journal
from app.run.payloads import PayloadStore
from app.run.remote import patiently
from app.run.storage import open_store

T = TypeVar("T")
_log = logging.getLogger(__name__)


def follower_of(spec: RunSpec) -> Follower:
    """A reader of the run's journal."""
    config = spec.config
    journal = Journal(open_store(spec.checkpoints), config.checkpoint.keep)

    def begin(state: Durable) -> Shadow:
        budget, most = config.train.tokens, config.most_step_tokens
        return Shadow(spec.run_id, spec.layout, config.diloco, budget, state, most)

    return Follower(journal, begin, config.checkpoint.snapshot_every_merges)


class Publisher:
    """The journal of one syncer process, and the two threads that work for it."""

    def __init__(
        self,
        spec: RunSpec,
        feed: Callable[[Event], None],
        note: Callable[..., None],
        consumed: Callable[[Sequence[Consumed]], None],
        noted: Callable[[], bool] = lambda: True,
        follower: Follower | None = None,
    ):
        """Claim the next epoch and read back what `follower`, if there is one, has not followed yet.

        `feed` takes events for the protocol, `note` for the tape, `consumed` what is durable of samples' use. `noted`
        says whether the tape has what it was given, after a moment at most; called in some thread.
        """
        self._spec, self._feed, self._note = spec, feed, note
        self._consumed, self._noted = consumed, noted
        self._compute = ThreadPoolExecutor(1, "merge")
        self._disk = ThreadPoolExecutor(1, "journal")
        self._lock = asyncio.Lock()
        self._payloads = PayloadStore(open_store(spec.payloads)) if spec.config.tape.payloads else None
        follower = follower or follower_of(spec)
        self._journal = follower.journal
        self.protocol = self._restore(self._claim(), follower)
        self.confirmed_at = time.monotonic()
        """When the journal was known to be this syncer's own."""
        self.merge_s = 0.0
        """Seconds of merging so far."""

    @property
    def dropped(self) -> Any:
        """Damaged records at the journal's end that were left out."""
        return self._journal.dropped

    def _claim(self) -> int:
        """Claim the next epoch; a disk that is full or gone is waited for, learners step on meanwhile."""
        while True:
            try:
                return self._journal.claim_epoch()
            except OSError:
                _log.exception("the journal can't be written")
                time.sleep(self._spec.config.diloco.journal_retry_s)

    def _restore(self, epoch: int, follower: Follower) -> Protocol:
        shadow = patiently(follower.catch_up)
        self.untold = self._untold(follower.merges)
        """Merges that the journal has and the tape does not, as events: the syncer before died in between."""
        if shadow is None:
            where = self._spec.checkpoints
            raise RuntimeError(f"{where} holds no version 0; the driver writes it before the syncer starts")
        self._since_snapshot = len(follower.merges)
        return shadow.protocol(epoch)

    def keep(self, contribution: Contribution) -> None:
        """Keep a contribution for replay, the first of its name. In the thread of arithmetic."""
        given, payload = contribution.sender, contribution.payload
        if self._payloads is None:
            return
        try:
            self._payloads.keep(given.epoch, contribution.round, given.learner, given.incarnation, payload.tobytes())
        except OSError as error:
            self._note("payload_lost", round=contribution.round, learner=given.learner, error=str(error))

    def _untold(self, merges: Collection[dict[str, Any]]) -> list[dict[str, Any]]:
        if not merges:
            return []
        events = patiently(lambda: tape.read(self._spec.tape))[0]
        told = {(e["fragment"], e["version"]) for e in events if e["kind"] == "merge"}
        return [merge for merge in merges if (merge["fragment"], merge["version"]) not in told]

    async def compute(self, call: Callable[[], T]) -> T:
        """Run arithmetic in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, call)

    async def merge(self, job: MergeJob) -> None:
        """Compute a merge and make it durable."""
        started = time.monotonic()
        result = await self.compute(job.run)
        self.merge_s += time.monotonic() - started
        async with self._lock:
            record, consumed = merge_record(self.protocol, result), self.protocol.books.consumed(result.contains)
            try:
                await self._append(record)
            except OSError as error:
                self._feed(PublishFailed(job, str(error)))
                return
            self._feed(Published(result))
            self._consumed(consumed)
            self._since_snapshot += 1
            if self._since_snapshot >= self._spec.config.checkpoint.snapshot_every_merges:
                await self._try_snapshot()

    async def record(self, decision: Record) -> None:
        """Make a decision that moves no values durable."""
        async with self._lock:
            try:
                await self._append(Durable(decision.meta, {}))
            except OSError as error:
                self._note("journal_failed", error=str(error))
                self._feed(RecordFailed(decision.ticket))
                return
            self._feed(Recorded(decision.ticket))

    async def snapshot(self) -> int:
        """Compact the journal now. Returns the sequence number that the snapshot stands for."""
        async with self._lock:
            return await self._snapshot()

    async def confirm(self) -> None:
        """Leave unless the journal is still this syncer's own. A store that can't be read says nothing."""
        asked_at = time.monotonic()
        with suppress(OSError):
            await asyncio.to_thread(self._own, self._journal.confirm)
            self.confirmed_at = max(self.confirmed_at, asked_at)

    async def _append(self, record: Durable) -> None:
        await self._write(lambda: self._own(lambda: self._journal.append(record.meta, record.tensors)))
        self.confirmed_at = time.monotonic()

    def _own(self, call: Callable[[], T]) -> T:
        """Whoever has been replaced leaves at once: nothing that it still says may be heard."""
        try:
            return call()
        except Fenced:
            _log.exception("another syncer has taken over this run")
            os._exit(1)

    async def _try_snapshot(self) -> None:
        try:
            await self._snapshot()
        except OSError as error:
            self._note("journal_failed", error=f"snapshot: {error}")

    async def _snapshot(self) -> int:
        self._since_snapshot = 0
        if not await asyncio.get_running_loop().run_in_executor(None, self._noted):
            # Records go with it, which are all that tells of merges that the tape may still lose.
            raise OSError(errno.EAGAIN, "the event tape is behind")
        state, consumed = whole_state(self.protocol), self.protocol.books.consumed()
        seq = await self._write(lambda: self._own(lambda: self._journal.snapshot(state.meta, state.tensors)))
        self._consumed(consumed)
        self._note("snapshot", seq=seq)
        return seq

    async def _write(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)
