"""A bad network in virtual time: it drops, delays, doubles and reorders messages, and kills whom it likes. Seeded."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from app.diloco.durable import Durable, merge_record, whole_state
from app.diloco.events import (
    Arrived,
    Decision,
    Event,
    Grant,
    Join,
    Lost,
    Merge,
    Published,
    PublishFailed,
    Record,
    Recorded,
    RecordFailed,
    Reported,
    Tick,
)
from app.diloco.messages import Consumed, Contribution, Hello, Offer, Reply, Welcome
from app.diloco.protocol import Protocol
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from tests.unit.samples import Samples
from tests.unit.tiny import RUN, restored, through_json, tiny_layout, tiny_parameters, tiny_state


@dataclass
class Process:
    """One process of a learner: it asks to join until it has."""

    name: str
    token: str
    speed: float
    replica: Replica | None = None
    parameters: dict[str, torch.Tensor] = field(default_factory=lambda: tiny_parameters(99))
    moved: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sum of all its own inner steps."""
    frozen_until: int = 0
    idle: bool = False


class World:
    """Syncer, journal, learners and the wires between them. One tick is one second."""

    def __init__(self, seed: int, learners: int, settings: DilocoSettings, *, faults: bool, deaths: bool):
        self.random = random.Random(seed)
        self.settings, self.faults, self.deaths = settings, faults, deaths
        self.layout = tiny_layout(settings.fragments)
        self.state, self.journal = tiny_state(settings), list[Durable]()
        self.epoch, self.now, self.ids = 1, 0, 0
        self.wires: list[tuple[int, str, Any]] = []
        self.queue: list[Merge | Record] = []
        self.writing: tuple[int, Merge | Record, Durable, Event, tuple[Consumed, ...]] | None = None
        self.samples = Samples(seed)
        self.captured: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.merged: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        self.rounds_merged: set[tuple[Any, ...]] = set()
        self.digests: dict[tuple[int, int], str] = {}
        self.versions = [0] * settings.fragments
        self.protocol = self._restored()
        self.processes: dict[str, Process] = {}
        for i in range(learners):
            self.start(f"learner-{i}")

    def _restored(self) -> Protocol:
        return restored(self.settings, self.state, self.journal, self.epoch, 10**9)

    def start(self, name: str) -> None:
        self.ids += 1
        self.processes[name] = Process(name, f"process-{self.ids}", self.random.choice([0.3, 0.7, 1.0]))

    # ---- the wires

    def send(self, kind: str, message: Any) -> None:
        chance = self.random.random
        copies = 1
        if self.faults:
            copies = 0 if chance() < 0.15 else 2 if chance() < 0.15 else 1
        for _ in range(copies):
            delay = self.random.choice([0, 0, 0, 1, 1, 2, 5, 12]) if self.faults else 0
            self.wires.append((self.now + delay, kind, message))

    def deliver(self) -> None:
        while due := [i for i, wire in enumerate(self.wires) if wire[0] <= self.now]:
            _, kind, message = self.wires.pop(self.random.choice(due) if self.faults else due[0])
            getattr(self, f"_on_{kind}")(message)

    def _on_hello(self, hello: Hello) -> None:
        self.feed(Join(hello))

    def _on_report(self, report: Any) -> None:
        self.feed(Reported(report))

    def _on_poll(self, report: Any) -> None:
        self.feed(Reported(report))
        reply = self.protocol.reply(report, self.now)[0]
        for offer in reply.offers:
            self._seen(offer)
        self.send("reply", (report.sender.learner, report.sender.incarnation, reply))

    def _on_contribution(self, given: Contribution) -> None:
        self.feed(Arrived.of(given, self.layout, self.settings))

    def _on_consumed(self, consumed: tuple[Consumed, ...]) -> None:
        self.samples.consume(consumed, self.faults)
        self.send("known", tuple(entry for entry in consumed if entry.ended))

    def _on_known(self, ended: tuple[Consumed, ...]) -> None:
        self.protocol.books.told(ended)

    def _on_lost(self, who: tuple[str, int]) -> None:
        self.feed(Lost(*who, "exit"))

    def _on_welcome(self, sent: tuple[str, Welcome]) -> None:
        token, welcome = sent
        process = self.processes[welcome.sender.learner]
        if process.token != token or process.replica is not None:
            return
        process.replica = self.begin(process, welcome)
        process.moved = {name: torch.zeros_like(tensor) for name, tensor in process.parameters.items()}

    def begin(self, process: Process, welcome: Welcome) -> Replica:
        return Replica(self.layout, self.settings, process.parameters, welcome)

    def _on_reply(self, sent: tuple[str, int, Reply]) -> None:
        name, incarnation, reply = sent
        process = self.processes[name]
        replica = process.replica
        if replica is None or replica.sender.incarnation != incarnation or reply.epoch < replica.sender.epoch:
            return
        if process.frozen_until > self.now:
            self.wires.append((process.frozen_until, "reply", sent))
            return
        if reply.fenced:
            self.start(name)
            return
        process.idle = process.idle or reply.finish
        asks = replica.hear(reply.epoch, reply.asks)
        for offer in reply.offers:
            replica.receive(offer)
        for ask in asks:
            if self.faults and not replica.leaving and self.random.random() < 0.3:
                self._inner_step(process)
            given = replica.contribute(ask, 1.0, 0.5, process.idle)
            key = (name, incarnation, given.fragment, ask.epoch, ask.round)
            assert key not in self.captured
            self.captured[key] = (given.report.tokens - given.c_tokens, given.report.tokens)
            self.send("contribution", given)

    def _seen(self, offer: Offer) -> None:
        """Whoever sees a version of a fragment sees the same one."""
        known = self.digests.setdefault((offer.fragment, offer.version), offer.digest)
        assert known == offer.digest

    # ---- the syncer

    def feed(self, event: Event) -> None:
        for decision in self.protocol.step(event, self.now):
            match decision:
                case Merge() | Record():
                    self.queue.append(decision)
                case Grant(token, welcome):
                    for offer in welcome.offers:
                        self._seen(offer)
                    self.send("welcome", (token, welcome))
                case _:
                    self.carry_out(decision)
        self.check()

    def carry_out(self, decision: Decision) -> None:
        """Whatever else is decided."""

    def check(self) -> None:
        protocol = self.protocol
        assert protocol.books.balance().exact
        for account in protocol.books.living:
            for p in range(self.settings.fragments):
                assert account.outstanding(p) >= account.claimed[p] >= 0
        versions = [fragment.version for fragment in protocol.fragments]
        assert all(new >= old for new, old in zip(versions, self.versions, strict=True))
        self.versions = versions
        assert (
            {a.learner: a.incarnation for a in protocol.books.living}
            == {m.learner: m.incarnation for m in protocol.members.values()}
            or not protocol.started
            or protocol.ended
        )

    def journal_tick(self) -> None:
        """One write at a time; it takes a while, and other events happen meanwhile."""
        if self.writing is None and self.queue:
            work = self.queue.pop(0)
            delay = self.random.choice([0, 0, 1, 3]) if self.faults else 0
            consumed: tuple[Consumed, ...] = ()
            if isinstance(work, Merge):
                result = work.job.run()
                record, then = merge_record(self.protocol, result), Published(result)
                consumed = self.protocol.books.consumed(result.contains)
            else:
                record, then = Durable(work.meta, {}), Recorded(work.ticket)
            self.writing = (self.now + delay, work, through_json(record), then, consumed)
        if self.writing is not None and self.writing[0] <= self.now:
            _, work, record, then, consumed = self.writing
            self.writing = None
            if self.faults and self.random.random() < 0.1:
                failed = PublishFailed(work.job, "full") if isinstance(work, Merge) else RecordFailed(work.ticket)
                self.feed(failed)
                return
            self._append(record)
            self.feed(then)
            self.send("consumed", consumed)
            if self.random.random() < 0.1:
                self.snapshot()

    def snapshot(self) -> None:
        self.state, self.journal = through_json(whole_state(self.protocol)), []
        self.send("consumed", self.protocol.books.consumed())

    def _append(self, record: Durable) -> None:
        self.journal.append(record)
        if record.meta["kind"] != "merge":
            return
        p = record.meta["fragment"]
        for entry in record.meta["contains"]:
            key = (entry["learner"], entry["incarnation"], p, entry["epoch"], entry["round"])
            assert key not in self.rounds_merged
            self.rounds_merged.add(key)
            self.merged.setdefault(key[:3], []).append(self.captured[key])
            self.samples.journaled(entry["learner"], entry["incarnation"], entry["samples"])

    def crash(self) -> None:
        """The syncer dies, maybe after a write that it could tell nobody about; its successor takes over."""
        if self.writing is not None and self.random.random() < 0.5:
            self._append(self.writing[2])
        self.queue, self.writing = [], None
        self.epoch += 1
        self.protocol = self._restored()
        self.send("consumed", self.protocol.books.consumed())
        self.check()

    # ---- the learners

    def _inner_step(self, process: Process) -> None:
        replica = process.replica
        assert replica is not None
        tokens = self.random.choice([7, 10, 13])
        sender = replica.sender
        samples = self.samples.take(sender.learner, sender.incarnation, 1 + tokens // 5, self.faults)
        with replica.writing(tokens, samples):
            for name, tensor in process.parameters.items():
                change = self.random.uniform(-1, 1) * 0.125
                tensor += change
                process.moved[name] += change

    def learner_tick(self, process: Process) -> None:
        replica, chance = process.replica, self.random.random
        if process.frozen_until > self.now:
            return
        if replica is None:
            self.send("hello", Hello(RUN, process.name, self.layout.hash, "pool", process.token))
            return
        if chance() < 0.7:
            replica.adopt()
        if not process.idle and chance() < process.speed:
            self._inner_step(process)
        self.send("poll" if chance() < 0.7 else "report", replica.report(1.0, 0.5, process.idle))

    def mischief(self) -> None:
        if not self.faults:
            return
        if self.random.random() < 0.02:
            self.crash()
        if not self.deaths or self.random.random() >= 0.03:
            return
        process = self.random.choice(list(self.processes.values()))
        if process.replica is not None and self.random.random() < 0.25:
            process.replica.leaving = process.idle = True
            return
        if self.random.random() < 0.4:
            process.frozen_until = self.now + self.random.choice([3, 8, 25])
            if process.replica is not None and self.random.random() < 0.5:
                self.send("lost", (process.name, process.replica.sender.incarnation))
            return
        if process.replica is not None and self.random.random() < 0.7:
            self.send("lost", (process.name, process.replica.sender.incarnation))
        self.start(process.name)

    def tick(self) -> None:
        self.now += 1
        self.mischief()
        for process in list(self.processes.values()):
            self.learner_tick(process)
        self.deliver()
        self.journal_tick()
        self.feed(Tick())
