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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from actors.spec import RunSpec
from app.diloco.codec import digest
from app.diloco.durable import Durable, merge_record, restore, whole_state
from app.diloco.events import Event, Published, PublishFailed, Record, Recorded, RecordFailed
from app.diloco.job import MergeJob
from app.diloco.messages import Consumed, Contribution
from app.diloco.protocol import Protocol
from app.run import tape
from app.run.journal import Fenced, Journal
from app.run.payloads import PayloadStore
from app.run.record import Record as Entry
from app.run.remote import patiently
from app.run.storage import open_store

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Publisher:
    """The journal of one syncer process, and the two threads that work for it."""

    def __init__(
        self,
        spec: RunSpec,
        feed: Callable[[Event], None],
        note: Callable[..., None],
        consumed: Callable[[Sequence[Consumed]], None],
        noted: Callable[[], bool] = lambda: True,
    ):
        """Claim the next epoch and read the state back.

        `feed` takes events for the protocol, `note` for the tape, `consumed` what is durable of samples' use. `noted`
        says whether the tape has what it was given, after a moment at most; called in some thread.
        """
        self._spec, self._feed, self._note = spec, feed, note
        self._consumed, self._noted = consumed, noted
        self._compute = ThreadPoolExecutor(1, "merge")
        self._disk = ThreadPoolExecutor(1, "journal")
        self._lock = asyncio.Lock()
        self._payloads = PayloadStore(open_store(spec.payloads)) if spec.config.tape.payloads else None
        self._journal = Journal(open_store(spec.checkpoints), spec.config.checkpoint.keep)
        self.protocol = self._restore(self._claim())
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

    def _restore(self, epoch: int) -> Protocol:
        spec = self._spec
        state, later = patiently(self._journal.load)
        self.untold = self._untold(later)
        """Merges that the journal has and the tape does not, as events: the syncer before died in between."""
        if state is None:
            raise RuntimeError(f"{spec.checkpoints} holds no version 0; the driver writes it before the syncer starts")
        self._since_snapshot = len(later)
        return restore(
            spec.run_id,
            epoch,
            spec.layout,
            spec.config.diloco,
            spec.config.train.tokens,
            Durable(state.meta, state.tensors),
            [Durable(record.meta, record.tensors) for record in later],
            spec.config.most_step_tokens,
        )

    def keep(self, contribution: Contribution) -> None:
        """Keep a contribution for replay, the first of its name. In the thread of arithmetic."""
        given, payload = contribution.sender, contribution.payload
        if self._payloads is None:
            return
        try:
            self._payloads.keep(given.epoch, contribution.round, given.learner, given.incarnation, payload.tobytes())
        except OSError as error:
            self._note("payload_lost", round=contribution.round, learner=given.learner, error=str(error))

    def _untold(self, later: Sequence[Entry]) -> list[dict[str, Any]]:
        merges = [record for record in later if record.meta["kind"] == "merge"]
        if not merges:
            return []
        events = patiently(lambda: tape.read(self._spec.tape))[0]
        told = {(e["fragment"], e["version"]) for e in events if e["kind"] == "merge"}
        fields = ("fragment", "round", "version", "clock", "share", "contains")
        return [
            {name: r.meta[name] for name in fields} | {"digest": digest(r.tensors.get("theta_hat", r.tensors["theta"]))}
            for r in merges
            if (r.meta["fragment"], r.meta["version"]) not in told
        ]

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

    async def _append(self, record: Durable) -> None:
        try:
            await self._write(lambda: self._journal.append(record.meta, record.tensors))
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
        seq = await self._write(lambda: self._journal.snapshot(state.meta, state.tensors))
        self._consumed(consumed)
        self._note("snapshot", seq=seq)
        return seq

    async def _write(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)
