"""Rank 0 of a learner: joins, then trains until it is told to stop, alone or with the other ranks of its group.

The training thread steps, adopts at step boundaries and never waits for anybody but its own data and its own group; the
link's threads talk to the syncer, the feed's thread leases blocks ahead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from actors.boundary import Boundary
from actors.crew import Crew, assembled
from actors.cutting import Cutting
from actors.departure import Departure
from actors.entering import enter
from actors.feed import Feed
from actors.leader import find_leader
from actors.learner import LearnerStatus
from actors.link import Link
from actors.peers import Peers
from actors.preload import cpu_s
from actors.recovery import DONATE_S, FRESH, Kept, restore
from actors.sabotage import Sabotage
from actors.spec import RunSpec
from actors.strides import Strides
from app.diloco.fragments import build_layout, specs_of
from app.diloco.messages import Hello, Payload, Reply
from app.diloco.replica import Replica
from app.diloco.slot_wait import SlotWait
from app.learning.data import load
from app.learning.gradients import GroupBroken
from app.learning.inner import InnerLoop
from app.learning.lead import LeadLoop
from app.learning.model import build_model
from app.learning.schedule import TokenEstimate, learning_rate, rejoin_factor

_log = logging.getLogger(__name__)

BOUNDARY_POLL_S = 0.02
"""How often an idle learner looks for offers to adopt."""

HELD_UP_S = 1.0
"""A step that waits for other learners for longer is not this one's own."""

GATHER_S = 0.8 * DONATE_S
"""Whoever asks for optimizer state of a sharded group gets an answer within this time."""


class Worker:
    """Rank 0 of a learner."""

    def __init__(self, spec: RunSpec, learner: str, timeline: dict[str, float], ranks: Sequence[Any]):
        """`ranks`: actors of its group's other ranks, where it has a group."""
        self._spec, self._learner, self._timeline = spec, learner, timeline
        self._pool = spec.config.pool_of(learner)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._state = "starting"
        self._error: str | None = None
        self._replica: Replica | None = None
        self._peers: Peers | None = None
        """The other learners, where gradients are shared with them."""
        self.sabotage = Sabotage()
        self._fresh = True
        """The optimizers had no state when this process began to step."""
        self._strides = Strides()
        self._stop = threading.Event()
        self._crew = Crew(spec, learner, ranks, self._fail) if ranks else None
        """The other ranks of its group, where it has one."""
        self._kept = Kept(spec, learner, self._stop)
        self._finish = threading.Event()
        self._idle = threading.Event()
        self._departure = Departure()
        self._thread = threading.Thread(target=self._guarded(self._train), name="train", daemon=True)
        self._boundary = Boundary(self._thread.is_alive)

    def start(self) -> None:
        """Start the training thread."""
        self._thread.start()

    def status(self) -> LearnerStatus:
        """Counters and state now."""
        replica, peers = self._replica, self._peers
        steps, stepped_at = self._strides.newest
        held_up = peers is not None and peers.sharing_s > HELD_UP_S
        return LearnerStatus(
            learner=self._learner,
            incarnation=replica.sender.incarnation if replica else 0,
            pid=os.getpid(),
            node_id=self._node_id,
            state="waiting" if held_up else self._state,
            steps=steps,
            stepped_at=stepped_at,
            tokens=replica.tokens if replica else 0,
            step_time=self._strides.step_time,
            loss=self._strides.loss,
            error=self._error,
            timeline=dict(self._timeline),
            ranks=() if self._crew is None else self._crew.places,
        )

    def leave(self, seconds: float, exits: bool = False) -> None:
        """Stop stepping, hand in what it has in so many seconds at most, and then be `left`.

        `exits`: end the process then; without it that is left to whoever asked.
        """
        self._departure.set(seconds, exits)

    def moments(self) -> Payload | None:
        """Its optimizer state of a moment ago, for another learner; None before it has one to give."""
        return self._kept.packed()

    def _guarded(self, body: Callable[[], None]) -> Callable[[], None]:
        """A thread that ends by an error ends the learner: the supervisor reads it and has the process replaced."""

        def run() -> None:
            try:
                body()
            except Exception as error:
                if self._crew is not None and isinstance(error, GroupBroken):
                    self._crew.broken(str(error))  # ends this process, unless a rank has said why
                else:
                    self._fail(traceback.format_exc())

        return run

    def _fail(self, error: str) -> None:
        self._error = error
        self._state = "failed"
        self._stop.set()
        _log.error("learner %s failed: %s", self._learner, error)

    def _train(self) -> None:
        spec, config = self._spec, self._spec.config
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # what Ray sets aside for this learner
        data = load(spec.fetch_data())
        if self._crew is not None:
            self._crew.call(data.manifest.vocab)
        model = build_model(config.model, data.manifest.vocab, config.data.seq_len, config.run.seed)
        layout = build_layout(specs_of(model), config.diloco.fragments)
        loop, weights = assembled(model, self._pool.train, self._crew, lambda: self._strides.patience_s(config))
        if isinstance(loop, LeadLoop):
            self._boundary.beat = loop.beat
            if loop.sharded:
                self._kept.gathered(lambda: self._boundary.run(loop.moments, GATHER_S))
        self._timeline["built"] = time.time()
        self._state = "joining"
        token = uuid.uuid4().hex
        hello = Hello(spec.run_id, self._learner, layout.hash, self._pool.name, token, dict(self._timeline), cpu_s())
        entry = enter(spec, hello, layout, weights, self._stop)
        if entry is None:
            return
        welcome, replica = entry.welcome, entry.replica
        self._replica = replica
        self._timeline["joined"] = time.time()
        source = restore(spec, self._learner, entry, loop)
        self._fresh = source == FRESH
        fields = {"learner": self._learner, "incarnation": replica.sender.incarnation, "source": source}
        try:
            find_leader(spec).handle.note.remote("recovered", fields)
        except (ValueError, RayError) as error:
            _log.info("not told: %s", error)
        self._estimate = TokenEstimate(config.train.tokens)
        self._estimate.update(welcome.tokens_processed, 0, live=config.learners)
        if welcome.finish:
            self._finish.set()
        if config.algo == "data_parallel":
            name = (self._learner, replica.sender.incarnation)
            self._peers = Peers(spec, name, loop, replica.lock, lambda: self._strides.step_time, self._finish)
        link = Link(
            spec,
            replica,
            self._strides.pace,
            self._on_reply,
            self._idle,
            self._leave,
            self._guarded,
            self.sabotage,
            between=(lambda do: do()) if self._crew is None else self._boundary.run,
        )
        position = (0, 0) if entry.part is None else entry.part.feed
        feed = Feed(spec, self._learner, replica.sender.incarnation, data, self._guarded, position)
        token = hello.token if entry.part is None else entry.part.token
        self._cutting = Cutting(spec, token, replica, loop, feed, self._boundary)
        feed.start()
        link.start()
        try:
            self._loop(loop, replica, link, feed)
        finally:
            link.stop()
            feed.stop()
            if self._peers is not None:
                self._peers.leave("stopped")
        if isinstance(loop, LeadLoop):
            loop.end()
        self._departure.go()

    def _loop(self, loop: InnerLoop, replica: Replica, link: Link, feed: Feed) -> None:
        slots, peers = SlotWait(self._spec.config.diloco, replica.clock), self._peers
        batches: list[torch.Tensor] | None = None
        while not self._stop.is_set():
            self._boundary.serve()
            replica.adopt()
            if self._departure.by is not None:
                self._hand_in(replica, self._departure.by)
            elif self._finish.is_set() and (peers is None or not peers.formed):
                self._rest()
            elif peers is not None and not peers.formed:
                self._state = "waiting"
                peers.meet()
            elif self._spec.config.diloco.blocking and slots.holds(*replica.clocks(), time.monotonic()):
                self._state = "waiting"  # for a merge: a synchronous algorithm
                self._stop.wait(BOUNDARY_POLL_S)
            else:
                batches = batches or feed.next(self._stop)
                if batches is None and peers is None:
                    self._state = "waiting"  # for data: the ledger is away for longer than was leased ahead
                    continue
                self._state = "training"
                if self._step(loop, replica, batches or []):
                    batches = None
                    link.stepped()

    def _step(self, loop: InnerLoop, replica: Replica, batches: Sequence[torch.Tensor]) -> bool:
        """One inner step; False when the group broke, so that none was made."""
        train, peers = self._pool.train, self._peers
        tokens, samples = sum(batch.numel() for batch in batches), sum(len(batch) for batch in batches)
        lr = learning_rate(self._estimate.at(replica.tokens), train)
        if self._fresh:
            lr *= rejoin_factor(replica.steps if peers is None else peers.steps, train.rejoin_warmup_steps)
        started = time.monotonic()
        try:
            result = loop.step(batches, lr, replica.writing(tokens, samples), None if peers is None else peers.share)
        except GroupBroken:
            if peers is None:
                raise
            return False
        if result.skipped:
            replica.skip_step(samples)
        self._kept.stepped(replica.steps, loop)
        own_s = time.monotonic() - started - (0.0 if peers is None else peers.shared_s)
        self._boundary.pause((self._pool.settings.slowdown - 1) * own_s, self._stop)
        self._strides.made(replica.steps, time.monotonic() - started, result.loss)
        if peers is not None:
            peers.stepped(result.skipped)
        return True

    def _hand_in(self, replica: Replica, by: float) -> None:
        """It has to go: nothing steps any more, and the link gives what there is until the syncer lets it go."""
        self._state = "leaving"
        self._idle.set()
        replica.leaving = True
        if self._peers is not None or time.monotonic() > by:
            self._left()
        self._stop.wait(BOUNDARY_POLL_S)

    def _left(self) -> None:
        self._state = "left"
        self._stop.set()

    def _rest(self) -> None:
        """The budget is reached: what is in the parameters now is what the last round gets."""
        self._state = "finished"
        self._idle.set()
        if not self._finish.is_set():  # the run goes on after all
            self._idle.clear()
            return
        self._stop.wait(BOUNDARY_POLL_S)

    def _on_reply(self, reply: Reply) -> None:
        replica = self._replica
        assert replica is not None  # the link starts after the replica
        if reply.cut is not None:
            self._cutting.want(reply.cut)
        self._estimate.update(reply.tokens_processed, replica.tokens, live=max(1, reply.live))
        if not reply.finish:  # also after a restart of the syncer, which may know of fewer tokens than it did
            self._finish.clear()
            if self._departure.by is None:
                self._idle.clear()
            return
        self._finish.set()
        while not self._idle.wait(BOUNDARY_POLL_S) and self._thread.is_alive():
            continue  # the step under way still counts

    def _leave(self) -> None:
        """Refused from now on. Either another process has this learner's place, or Ray starts one when this ends."""
        if self._departure.by is not None:
            self._left()
            return
        _log.warning("learner %s is fenced", self._learner)
        os._exit(1)
