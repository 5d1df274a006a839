"""The syncer: an asyncio actor that feeds the protocol's state machine and carries out what it decides.

One event loop owns the machine, so nothing of it needs a lock; arithmetic and disk run in threads of their own
(`publishing.py`), polls park in the loop. It is detached and restarts by itself: everything durable is in the journal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from actors.admission import Admission, Denied
from actors.consumption import Consumption
from actors.cuts import CutMaker
from actors.learner import HANG_SIGNAL
from actors.publishing import Publisher
from actors.spec import RunSpec
from actors.syncer_status import SyncerStatus, Traffic, status_of
from app.diloco.codec import get_codec
from app.diloco.durable import whole_state
from app.diloco.events import (
    Arrived,
    CutBegun,
    CutDone,
    CutGivenUp,
    Decision,
    Deny,
    Ended,
    Event,
    Finish,
    Grant,
    Join,
    Lost,
    Merge,
    Note,
    Record,
    Reported,
    Tick,
    Wake,
)
from app.diloco.messages import Consumed, Contribution, Hello, Payload, Reply, Report, Welcome
from app.diloco.whole import is_contribution, is_hello, sender_of
from app.run import tape
from app.run.following import Follower

_log = logging.getLogger(__name__)

PARK_S = 2.0
"""A poll without news is answered after this long, so that a lost one is asked again."""
IDLE_TICK_S = 1.0
"""The machine looks at the time at least this often."""
LEDGER_S = 5.0
"""A run that ends waits this long for its data ledger."""


TELLING_S = 0.5
"""What is noted is waited for so long to be readable; whoever notes it has other work to do."""
SETTLED_S = 5.0
"""A snapshot waits for so long for the tape to have all merges that it covers."""
SAMPLES = ("learner", "syncer")
"""Kinds of events that come all the time and that nothing depends on."""


@dataclasses.dataclass(frozen=True)
class Takeover:
    """What one of two syncers starts from."""

    follower: Follower
    """It has followed the journal so far."""
    hold: Callable[[], Awaitable[None]]
    """Makes sure that this one still leads."""
    silent_since: float | None
    """Unix time of the newest sign of the one before; None where nobody was heard to lead."""


class Syncer:
    """Owner of the global model. All methods are safe to call twice."""

    def __init__(self, spec: RunSpec, takeover: Takeover | None = None):
        """`takeover`: where there are two."""
        faulthandler.register(HANG_SIGNAL, all_threads=True)
        torch.set_num_threads(1)
        self._hold = takeover.hold if takeover is not None else None
        self._spec = spec
        tape.recover(spec.tape, spec.spool)
        self._traffic = Traffic()
        diloco = spec.config.diloco
        for codec in (diloco.codec_up, diloco.codec_down):
            get_codec(codec, diloco.codec_block)  # its kernels are compiled before anybody waits
        self._ended: str | None = None
        self._last_cut: asyncio.Task[None] | None = None
        """The one that is made when it is told to finish."""
        self._admission = Admission()
        self._news: dict[str, asyncio.Event] = {}
        self._poked = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._consumption = Consumption(spec, self._known)
        self._cuts = CutMaker(spec, self._feed, self._write, self._spawn, self._consumption)
        follower = takeover.follower if takeover is not None else None
        self._publisher = Publisher(spec, self._feed, self._write, self._consumption.tell, self._noted, follower)
        self._protocol = self._publisher.protocol
        self._consumption.tell(self._protocol.books.consumed())
        self._tape = tape.open_tape(spec.tape, self._protocol.epoch, spec.spool)
        versions = [fragment.version for fragment in self._protocol.fragments]
        epoch, dropped = self._protocol.epoch, self._publisher.dropped
        settings = dataclasses.asdict(diloco)
        start = {"pid": os.getpid(), "versions": versions, "dropped": dropped, "settings": settings}
        if takeover is not None and takeover.silent_since is not None:
            start["silent_since"] = takeover.silent_since
        for merge in self._publisher.untold:
            self._write("merge_recovered", **merge)
        self._write("syncer_started", epoch=epoch, **start)

    # ---- called by learners

    async def join(self, hello: Hello) -> Welcome:
        """Admit a learner process, once its incarnation is durable. Raises Denied."""
        self._start()
        if not is_hello(hello):
            self._feed(Join(hello))  # counted
            raise Denied("this is no hello")
        if not self._spec.config.has_learner(hello.learner):
            raise Denied(f"{hello.learner} is no learner of this run")
        welcome = await self._admission.ask(hello.token, lambda: self._feed(Join(hello)))
        for offer in welcome.offers:
            self._count_down(offer.payload.size, offer.fragment)
        return welcome

    async def poll(self, report: Report, *given: Contribution) -> Reply:
        """Take a report and answers to asks; reply as soon as there is news for the sender, or after a while.

        What became of a contribution shows in the next offer.
        """
        self._start()
        for contribution in given:
            self._take(contribution)
        self._feed(Reported(report))
        sender = sender_of(report)
        if sender is None or sender.learner not in self._protocol.members:
            return self._protocol.reply(report, time.monotonic())[0]
        news = self._news.setdefault(sender.learner, asyncio.Event())
        deadline = time.monotonic() + PARK_S
        while True:
            news.clear()
            reply, urgent = self._protocol.reply(report, time.monotonic())
            left = deadline - time.monotonic()
            if urgent or left <= 0:
                for offer in reply.offers:
                    self._count_down(offer.payload.size, offer.fragment)
                return reply
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                continue

    async def report(self, report: Report) -> None:
        """Take a report."""
        self._start()
        self._feed(Reported(report))

    def _take(self, contribution: Contribution) -> None:
        if not is_contribution(contribution, len(self._spec.layout.fragments)):
            self._feed(Arrived(contribution, None))  # counted as garbage
            return
        self._traffic.up += contribution.payload.nbytes  # what is refused was sent too
        self._traffic.up_fp32 += 4 * self._spec.layout.fragments[contribution.fragment].numel
        self._spawn(self._decode(contribution))

    async def _decode(self, contribution: Contribution) -> None:
        self._feed(await self._publisher.compute(lambda: self._arrived(contribution)))

    def _arrived(self, contribution: Contribution) -> Arrived:
        event = Arrived.of(contribution, self._spec.layout, self._spec.config.diloco)
        if event.delta is not None:
            self._publisher.keep(contribution)
        return event

    # ---- called by supervisor, evaluator and driver

    async def lost(self, learner: str, incarnation: int, reason: str) -> None:
        """This incarnation is gone, or must be treated so: it is refused from now on."""
        self._feed(Lost(learner, incarnation, reason))

    async def note(self, kind: str, fields: dict[str, Any]) -> None:
        """Write somebody else's event to the tape; the syncer alone writes it.

        On return others can read it, unless it is a sample or the tape is slow: a fault must not strike twice.
        """
        self._write(kind, **fields)
        if kind not in SAMPLES and not self._tape.written(0.0):
            await asyncio.get_running_loop().run_in_executor(None, self._tape.written, TELLING_S)

    async def finish(self, reason: str, deadline_s: float) -> None:
        """End the run with a last round of all fragments; before it, where there are any, a last consistent cut."""
        self._start()
        if self._spec.config.checkpoint.full:
            if self._last_cut is None:
                make = self._cuts.make(deadline_s)
                self._last_cut = asyncio.get_running_loop().create_task(make)
            await asyncio.wait([self._last_cut], timeout=deadline_s)
        self._feed(Finish(reason, deadline_s))

    async def weights(self) -> tuple[tuple[int, ...], list[Payload], int]:
        """Versions, Θ̄ of every fragment (fp32 bytes) and processed tokens, all of one moment."""
        fragments = self._protocol.fragments
        values = [f.average.numpy().view("uint8") for f in fragments]
        return tuple(f.version for f in fragments), values, self._protocol.books.tokens

    async def conclude(self) -> None:
        """At the run's end: compact the journal, and let the data ledger know what became of all samples."""
        await self._publisher.snapshot()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._cuts.quiet(), LEDGER_S)
        if await self._consumption.settled(LEDGER_S) and self._consumption.counts is not None:
            self._write("samples", **dataclasses.asdict(self._consumption.counts))

    async def pid(self) -> int:
        """Process id."""
        return os.getpid()

    async def status(self) -> SyncerStatus:
        """Where the run stands."""
        self._start()
        return status_of(self._protocol, self._traffic, self._publisher.merge_s, self._ended)

    # ---- with a standby

    @property
    def epoch(self) -> int:
        """Under which it leads."""
        return self._protocol.epoch

    async def confirm(self, within_s: float) -> None:
        """Leave if another syncer has taken over; not looked at again where that was known so short a time ago."""
        if time.monotonic() - self._publisher.confirmed_at > within_s:
            await self._publisher.confirm()

    # ---- carrying out

    def _start(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
            self._ticker.add_done_callback(self._done)
            self._spawn(self._consumption.run())
            if self._spec.config.checkpoint.full:
                self._spawn(self._cuts.run())

    async def _tick(self) -> None:
        while True:
            wait = min(IDLE_TICK_S, self._protocol.next_wake - time.monotonic())
            try:
                await asyncio.wait_for(self._poked.wait(), max(wait, 0.0))
            except TimeoutError:
                if self._hold is not None:
                    await self._hold()
                self._feed(Tick())
            self._poked.clear()

    def _feed(self, event: Event) -> None:
        for decision in self._protocol.step(event, time.monotonic()):
            self._carry_out(decision)
        self._poked.set()  # the next wake-up may have moved

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Merge(job):
                self._spawn(self._publisher.merge(job))
            case Record():
                self._spawn(self._publisher.record(decision))
            case Grant(token, welcome):
                self._admission.grant(token, welcome)
            case Deny(token, why, again):
                self._admission.deny(token, why, again)
            case Wake(learners):
                for learner in learners:
                    if learner in self._news:
                        self._news[learner].set()
            case Note(kind, fields):
                self._write(kind, **fields)
            case Ended(reason):
                self._ended = reason
            case CutBegun(id):
                self._cuts.begun(id, whole_state(self._protocol))
            case CutDone(id, learners):
                self._cuts.done(id, learners)
            case CutGivenUp(id, missing):
                self._cuts.given_up(id, f"not saved by {', '.join(missing) or 'anybody'}")

    def _known(self, ended: Sequence[Consumed]) -> None:
        self._protocol.books.told(ended)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A merge that is lost half-way would hold its fragment for ever; a restart goes on from the journal.
            _log.critical("the syncer failed", exc_info=task.exception())
            os._exit(1)

    def _count_down(self, size: int, fragment: int) -> None:
        self._traffic.down += size
        self._traffic.down_fp32 += 4 * self._spec.layout.fragments[fragment].numel

    def _noted(self) -> bool:
        """Whether the tape has all that it was given, after a while at most."""
        return self._tape.written(SETTLED_S)

    def _write(self, kind: str, **fields: Any) -> None:
        """A tape that can't be written costs events, never merges."""
        try:
            self._tape.write(kind, **fields)
        except OSError:
            _log.exception("the event tape can't be written")
