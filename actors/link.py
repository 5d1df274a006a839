"""A learner's line to the syncer: two threads beside the training thread, which never waits for them.

`hear` keeps one poll parked at the syncer, hands the offers that come back to the replica, and sends the answers to
the asks with the next poll; `tell` reports the clock when it crossed a slot at which a fragment may fall due. A syncer
that is gone costs merges, not steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ray.exceptions import RayError

from actors.admission import Denied, TryAgain
from actors.leader import Leader, find_leader, reply_of
from actors.sabotage import Sabotage
from actors.spec import RunSpec
from app.diloco.clock import due_slots
from app.diloco.messages import Ask, Contribution, Hello, Reply, Report, Welcome
from app.diloco.replica import Captured, Replica
from app.diloco.whole import is_reply, is_welcome

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
"""No call to the syncer is waited for longer; a parked poll is answered well within."""
RETRY_S = 0.2
REPORT_EVERY_S = 1.0
"""A slow learner reports at least this often."""
Between = Callable[[Callable[[], list[Captured]]], list[Captured] | None]
"""Calls something when no step is under way, or at once where that does not matter; None when it could not."""


def join(spec: RunSpec, hello: Hello, stop: threading.Event) -> Welcome | None:
    """Ask to join until the syncer answers; None when told to stop. Raises Denied, the syncer's refusal."""
    while not stop.is_set():
        try:
            syncer = find_leader(spec)
            welcome: Welcome = reply_of(spec, syncer, syncer.handle.join.remote(hello), CALL_TIMEOUT_S)
            if is_welcome(welcome, len(spec.layout.fragments)):
                return welcome
            _log.warning("what came as a welcome is none")
            stop.wait(RETRY_S)
        except Denied as error:
            if not isinstance(error, TryAgain):
                raise
            stop.wait(RETRY_S)
        except (RayError, ValueError, TimeoutError) as error:
            _log.info("no syncer yet: %s", error)
            stop.wait(RETRY_S)
    return None


class Link:
    """Reports, answers and receives for one replica."""

    def __init__(
        self,
        spec: RunSpec,
        replica: Replica,
        pace: Callable[[], tuple[float, float]],
        on_reply: Callable[[Reply], None],
        idle: threading.Event,
        fenced: Callable[[], None],
        guarded: Callable[[Callable[[], None]], Callable[[], None]],
        sabotage: Sabotage,
        between: Between,
    ):
        """`pace` gives (step time, loss) now; `on_reply` hears every reply before its asks are answered.

        `guarded` wraps a thread's body so that its failure is the learner's. `between` calls what touches parameters.
        """
        self._spec = spec
        self._replica = replica
        self._pace = pace
        self._on_reply = on_reply
        self._idle = idle
        self._fenced = fenced
        self._sabotage = sabotage
        self._between = between
        self._syncer: Leader | None = None
        self._stop = threading.Event()
        self._due = threading.Event()
        self._last_told = 0.0
        self._told_clock = replica.clock
        self._threads = [
            threading.Thread(target=guarded(self._hear), name="hear", daemon=True),
            threading.Thread(target=guarded(self._tell), name="tell", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the threads end; does not wait for a parked poll."""
        self._stop.set()
        self._due.set()

    def stepped(self) -> None:
        """The training thread made a step: report it if a fragment may have fallen due by it."""
        diloco, clock = self._spec.config.diloco, self._replica.clock
        due, _ = due_slots(self._told_clock, clock, diloco.fragments, diloco.sync_interval)
        if due or time.monotonic() - self._last_told >= REPORT_EVERY_S:
            self._told_clock = clock
            self._due.set()

    def _report(self) -> Report:
        step_time, loss = self._pace()
        return self._replica.report(step_time, loss, self._idle.is_set())

    def _tell(self) -> None:
        while not self._stop.is_set():
            self._due.wait()
            self._due.clear()
            self._last_told = time.monotonic()
            syncer = self._syncer
            if self._sabotage.muted or syncer is None:
                continue
            try:
                syncer.handle.report.options(num_returns=0).remote(self._report())  # nobody waits for it
            except RayError as error:
                _log.info("report not sent: %s", error)

    def _hear(self) -> None:
        given: list[Contribution] = []
        self._find_again()
        while not self._stop.is_set():
            try:
                if self._sabotage.muted:
                    raise TimeoutError("muted")
                if self._syncer is None:
                    raise TimeoutError("nobody leads")
                work = self._syncer.handle.poll.remote(self._report(), *given)
                reply: Reply = reply_of(self._spec, self._syncer, work, CALL_TIMEOUT_S)
                if self._sabotage.muted:
                    raise TimeoutError("muted")
                if not is_reply(reply, len(self._spec.layout.fragments)):
                    raise TimeoutError("what came as a reply is none")
            except (RayError, TimeoutError) as error:
                _log.info("syncer away: %s", error)
                given = []  # the round they were for may be over; its work is still in the parameters
                self._stop.wait(RETRY_S)
                self._find_again()
                continue
            given = self._take(reply)

    def _take(self, reply: Reply) -> list[Contribution]:
        """Do what the reply says. Returns the answers to its asks."""
        if reply.epoch < self._replica.sender.epoch:  # a syncer that was replaced has nothing to say
            self._stop.wait(RETRY_S)
            self._find_again()
            return []
        if reply.fenced:
            self._stop.set()
            self._fenced()
            return []
        self._on_reply(reply)
        asks = self._replica.hear(reply.epoch, reply.asks)
        for offer in reply.offers:
            self._replica.receive(offer)
        captured = self._between(lambda: self._capture(asks)) or []
        return [self._sabotage.passed(self._replica.encode(each)) for each in captured]

    def _capture(self, asks: tuple[Ask, ...]) -> list[Captured]:
        if self._idle.is_set():  # nobody steps: every moment is a step boundary
            self._replica.adopt()
        step_time, loss = self._pace()
        return [self._replica.capture(ask, step_time, loss, self._idle.is_set()) for ask in asks]

    def _find_again(self) -> None:
        try:
            self._syncer = find_leader(self._spec)
        except (ValueError, RayError) as error:
            _log.info("no syncer: %s", error)
