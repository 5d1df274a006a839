"""A model of a few numbers, and a protocol driven by hand: what the tests of the state machine share."""

import json
from dataclasses import replace
from typing import Any

import torch

from app.diloco.durable import Durable, first_state, merge_record
from app.diloco.events import (
    Arrived,
    Decision,
    Deny,
    Ended,
    Event,
    Grant,
    Join,
    Merge,
    Note,
    Published,
    Record,
    Recorded,
    Reported,
    Wake,
)
from app.diloco.fragments import Layout, TensorSpec, build_layout
from app.diloco.job import MergeJob
from app.diloco.messages import Ask, Contribution, Hello, Reply
from app.diloco.protocol import Protocol
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from app.diloco.shadow import restore

SPECS = [
    TensorSpec("emb", (7, 2), True),
    TensorSpec("a", (3, 2), False),
    TensorSpec("b", (5,), False),
    TensorSpec("c", (4,), False),
    TensorSpec("d", (2, 2), False),
]
RUN = "run"
LONG_AGO_S = 1e6
"""Hands step while no time passes: their learners have joined so long ago that any number of steps is possible."""


def tiny_layout(fragments: int) -> Layout:
    return build_layout(SPECS, fragments)


def tiny_parameters(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def through_json(durable: Durable) -> Durable:
    """As it comes back from a disk."""
    tensors = {name: tensor.clone() for name, tensor in durable.tensors.items()}
    return Durable(json.loads(json.dumps(durable.meta, allow_nan=False)), tensors)


def tiny_state(settings: DilocoSettings, seed: int = 0) -> Durable:
    return through_json(first_state(RUN, tiny_layout(settings.fragments), tiny_parameters(seed)))


def restored(
    settings: DilocoSettings,
    state: Durable,
    later: list[Durable],
    epoch: int,
    budget: int,
    most_step_tokens: int | None = None,
) -> Protocol:
    return restore(RUN, epoch, tiny_layout(settings.fragments), settings, budget, state, later, most_step_tokens)


class Hand:
    """A protocol, its learners and its journal; every message moves when the test says so."""

    def __init__(self, budget: int = 10**9, most_step_tokens: int | None = None, **dials: Any):
        defaults = {"fragments": 2, "sync_interval": 4, "outer_lr": 1.0, "outer_momentum": 0.0}
        self.settings = DilocoSettings(**(defaults | dials))
        self.budget, self.most_step_tokens = budget, most_step_tokens
        self.state = tiny_state(self.settings)
        self.journal: list[Durable] = []
        self.epoch = 1
        self.protocol = restored(self.settings, self.state, [], self.epoch, budget, most_step_tokens)
        self.now = 100.0
        self.replicas: dict[str, Replica] = {}
        self.parameters: dict[str, dict[str, torch.Tensor]] = {}
        self.jobs: list[MergeJob] = []
        self.decisions: list[Decision] = []
        self.tokens = 0

    # ---- feeding

    def feed(self, event: Event) -> list[Decision]:
        decisions = self.protocol.step(event, self.now)
        self.decisions += decisions
        self.jobs += [d.job for d in decisions if isinstance(d, Merge)]
        self.check()
        return decisions

    def check(self) -> None:
        assert self.protocol.books.balance().exact
        for account in self.protocol.books.living:
            assert all(account.outstanding(p) >= account.claimed[p] >= 0 for p in range(self.settings.fragments))

    def hello(self, name: str, token: str, **fields: Any) -> Hello:
        hello = Hello(RUN, name, tiny_layout(self.settings.fragments).hash, "pool", token)
        return replace(hello, **fields)

    def join(self, name: str, token: str = "") -> Replica:
        token = token or f"{name}-{len(self.decisions)}"
        self.greet(self.hello(name, token))
        grant = self.last(Grant)
        assert grant.token == token
        self.protocol.members[name].pace.began_at -= LONG_AGO_S
        self.parameters[name] = tiny_parameters(99)
        layout = tiny_layout(self.settings.fragments)
        self.replicas[name] = Replica(layout, self.settings, self.parameters[name], grant.welcome)
        return self.replicas[name]

    def greet(self, hello: Hello) -> None:
        """A hello arrives; what is to be recorded of it is."""
        for decision in self.feed(Join(hello)):
            if isinstance(decision, Record):
                self.journal.append(through_json(Durable(decision.meta, {})))
                self.feed(Recorded(decision.ticket))

    def step(self, name: str, steps: int = 1, tokens: int = 10, change: float = 0.125) -> None:
        """Inner steps: every parameter moves by `change` in each."""
        for _ in range(steps):
            with self.replicas[name].writing(tokens):
                for tensor in self.parameters[name].values():
                    tensor += change

    def poll(self, name: str, idle: bool = False) -> Reply:
        report = self.replicas[name].report(1.0, 0.5, idle)
        self.feed(Reported(report))
        return self.protocol.reply(report, self.now)[0]

    def ask(self, name: str) -> tuple[Ask, ...]:
        """Poll, receive what is offered, and return what is to be answered."""
        reply = self.poll(name)
        for offer in reply.offers:
            assert self.replicas[name].receive(offer)
        return self.replicas[name].hear(reply.epoch, reply.asks)

    def capture(self, name: str, fragment: int) -> Contribution:
        """The answer to the open round of that fragment, which this learner hears of now."""
        asks = {ask.fragment: ask for ask in self.ask(name)}
        return self.replicas[name].contribute(asks[fragment], 1.0, 0.5, False)

    def arrive(self, given: Contribution) -> None:
        self.feed(Arrived.of(given, self.protocol.layout, self.settings))

    def answer(self, name: str, fragment: int) -> Contribution:
        given = self.capture(name, fragment)
        self.arrive(given)
        return given

    def publish(self) -> None:
        """Compute, record and publish every merge that was decided."""
        while self.jobs:
            result = self.jobs.pop(0).run()
            self.journal.append(through_json(merge_record(self.protocol, result)))
            self.feed(Published(result))

    def work(self, change: float, *names: str) -> None:
        """Two inner steps of these learners, and the versions that come of them."""
        for name in names:
            self.step(name, 2, change=change)
        for name in names:
            self.poll(name)
        for p in sorted(self.protocol.rounds):
            for name in names:
                self.answer(name, p)
        self.publish()

    def adopt(self, name: str) -> None:
        for offer in self.poll(name).offers:
            self.replicas[name].receive(offer)
        self.replicas[name].adopt()
        self.poll(name)

    def restart(self) -> None:
        """The syncer dies and comes back from its journal."""
        self.epoch += 1
        self.jobs.clear()
        self.protocol = restored(
            self.settings, self.state, self.journal, self.epoch, self.budget, self.most_step_tokens
        )

    # ---- looking

    def last(self, kind: type) -> Any:
        return [d for d in self.decisions if isinstance(d, kind)][-1]

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [d.fields for d in self.decisions if isinstance(d, Note) and d.kind == kind]

    def refused(self) -> list[str]:
        return [fields["reason"] for fields in self.notes("refused")]

    @property
    def ended(self) -> bool:
        return any(isinstance(d, Ended) for d in self.decisions)

    @property
    def denials(self) -> list[str]:
        return [d.why for d in self.decisions if isinstance(d, Deny)]

    @property
    def woken(self) -> set[str]:
        return {name for d in self.decisions if isinstance(d, Wake) for name in d.learners}


def opened(**dials: Any) -> Hand:
    """P = 2, H = 4: fragment 1 is due at steps 2, 6, ... and fragment 0 at 4, 8, ...

    Learners a and b are at step 2 and the round of fragment 1 is open.
    """
    hand = Hand(**dials)
    for name in ("a", "b"):
        hand.join(name)
    for name in ("a", "b"):
        hand.step(name, 2)
        hand.poll(name)
    assert list(hand.protocol.rounds) == [1]
    return hand
