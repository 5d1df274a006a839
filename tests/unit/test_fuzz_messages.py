"""Whatever a peer sends, the syncer's state machine takes it for what it is, and the honest learners go on."""

import contextlib
import copy
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.diloco.events import Arrived, Reported
from app.diloco.messages import Contribution
from app.diloco.pace import FREE_STEPS
from app.run.lines import finite
from tests.fuzz import anything, arrays, efforts
from tests.unit.tiny import Hand

BATCH = 10
STEPS = 2


def deep(path: tuple[str, ...], message: Any, change: Callable[[Any, str], None]) -> Any:
    """A copy of a message with a change at the end of a path of fields."""
    message = copy.copy(message)
    if len(path) > 1:
        vars(message)[path[0]] = deep(path[1:], vars(message)[path[0]], change)
    else:
        change(message, path[0])
    return message


def paths(message: Any) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for field in fields(message):
        found.append((field.name,))
        inner = getattr(message, field.name)
        if is_dataclass(inner):
            found += [(field.name, *path) for path in paths(inner)]
    return found


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a message: at the field of this number, counting round."""

    place: int
    kind: str
    value: Any


faults = st.lists(
    st.builds(
        Fault,
        st.integers(0, 59),
        st.sampled_from(["put", "put", "put", "less", "more", "nudge"]),
        st.one_of(anything, st.sampled_from([-1, 1, 10, 1000, 2**40])),
    ),
    min_size=1,
    max_size=3,
)


def garbled(message: Any, wrong: list[Fault]) -> Any:
    """The message with fields that are missing, too many, or something else."""

    def change(part: Any, name: str) -> None:
        match fault.kind:
            case "put":
                vars(part)[name] = fault.value
            case "less":
                vars(part).pop(name, None)
            case "more":
                vars(part)["more"] = fault.value
            case "nudge" if type(vars(part).get(name)) is int and type(fault.value) is int:
                vars(part)[name] += fault.value

    places = paths(message)
    for fault in wrong:
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # the part is not there any more
            message = deep(places[fault.place % len(places)], message, change)
    return message


def fleet(**dials: Any) -> Hand:
    """a and b are honest; c has just joined and made two steps. A round is open."""
    hand = Hand(most_step_tokens=BATCH, **dials)
    for name in ("a", "b", "c"):
        hand.join(name)
        hand.step(name, STEPS, tokens=BATCH)
    hand.protocol.members["c"].pace.began_at = hand.now
    for name in ("a", "b", "c"):
        hand.poll(name)
    return hand


def works(hand: Hand, *names: str) -> None:
    """These learners make two steps and answer what they are asked; rounds end without the others."""
    for name in names:
        hand.step(name, STEPS, tokens=BATCH)
        hand.poll(name)
    for name in names:
        for ask in hand.ask(name):
            hand.arrive(hand.replicas[name].contribute(ask, 1.0, 0.5, False))
    hand.now += hand.settings.round_deadline_s
    for name in names:
        hand.poll(name)
    hand.publish()


def goes_on(hand: Hand) -> None:
    """The honest are members, nothing of theirs was refused, and what they give is merged; the tape can be written."""
    before = hand.protocol.merges
    for name in ("a", "b"):
        assert name in hand.protocol.members
        assert not [note for note in hand.notes("refused") if note["learner"] == name]
        hand.adopt(name)
    works(hand, "a", "b")
    works(hand, "a", "b")
    assert hand.protocol.merges > before
    assert {"a", "b"} <= {c["learner"] for merge in hand.notes("merge") for c in merge["contains"]}
    for fragment in hand.protocol.fragments:
        assert bool(torch.isfinite(fragment.theta).all())
        assert bool(torch.isfinite(fragment.momentum).all())
    for note in hand.notes("refused"):
        json.dumps(finite(note), allow_nan=False)
    for record in hand.journal:
        json.dumps(record.meta, allow_nan=False)


def send(hand: Hand, message: Any) -> None:
    """As the syncer takes it, report or contribution; a poll gets an answer in any case."""
    if type(message) is Contribution:
        hand.feed(Arrived.of(message, hand.protocol.layout, hand.settings))
    else:
        hand.feed(Reported(message))
        hand.protocol.reply(message, hand.now)


@efforts
def test_no_report_harms(effort: settings) -> None:
    @effort
    @given(st.lists(faults, min_size=1, max_size=4))
    def holds(letters: list[list[Fault]]) -> None:
        hand = fleet()
        for wrong in letters:
            send(hand, garbled(hand.replicas["c"].report(1.0, 0.5, False), wrong))
        assert hand.protocol.clock.t <= STEPS + FREE_STEPS
        assert hand.protocol.books.tokens <= BATCH * (3 * STEPS + FREE_STEPS)
        goes_on(hand)

    holds()


@efforts
def test_no_contribution_harms(effort: settings) -> None:
    @effort
    @given(st.lists(faults, min_size=1, max_size=4))
    def holds(letters: list[list[Fault]]) -> None:
        hand = fleet(codec_up="int8", codec_block=16)
        honest = hand.capture("c", 1)
        for wrong in letters:
            send(hand, garbled(honest, wrong))
        goes_on(hand)

    holds()


@efforts
def test_no_payload_harms(effort: settings) -> None:
    """Be its digest right or not."""

    @effort
    @given(payload=st.one_of(arrays, st.binary(max_size=80).map(as_bytes)), sealed=st.booleans())
    def holds(payload: np.ndarray, sealed: bool) -> None:
        hand = fleet()
        message = hand.capture("c", 1)
        digest = hashlib.sha256(np.ascontiguousarray(payload[:99]).tobytes()).hexdigest() if sealed else message.digest
        send(hand, replace(message, payload=payload, digest=digest))
        goes_on(hand)

    holds()


def as_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@efforts
def test_no_hello_harms(effort: settings) -> None:
    @effort
    @given(faults)
    def holds(wrong: list[Fault]) -> None:
        hand = fleet()
        hand.greet(garbled(hand.hello("c", "token", timeline={"actor": 1.0}, cpu_s=1.0), wrong))
        goes_on(hand)

    holds()


def test_who_keeps_sending_garbage_is_fenced_off() -> None:
    hand = fleet()
    report = hand.replicas["c"].report(1.0, 0.5, False)
    for _ in range(hand.settings.most_garbage):
        assert "c" in hand.protocol.members
        send(hand, deep(("held",), report, lambda part, name: vars(part).update({name: None})))
    assert hand.notes("leave")[-1] == {"learner": "c", "incarnation": 1, "reason": "garbage"}
    assert hand.protocol.reply(report, hand.now)[0].fenced
    goes_on(hand)


def test_who_never_can_read_what_it_gets_is_fenced_off() -> None:
    """Its digests never match, so it asks for full values for ever; one that can read them is not counted."""
    hand = fleet()
    works(hand, "a", "b")
    pulls = 0
    while "c" in hand.protocol.members:
        for offer in hand.poll("c").offers:
            hand.replicas["c"].receive(replace(offer, digest="0" * 64))
            pulls += 1
        assert pulls <= 100
    assert hand.notes("leave")[-1] == {"learner": "c", "incarnation": 1, "reason": "digest"}
    assert pulls >= hand.settings.most_garbage
    goes_on(hand)


def test_a_full_value_that_can_be_read_ends_the_count() -> None:
    hand = fleet()
    for _ in range(3 * hand.settings.most_garbage):
        works(hand, "a", "b", "c")
        offers = hand.poll("c").offers
        assert offers
        for offer in offers:
            hand.replicas["c"].receive(replace(offer, digest="0" * 64))
        full = hand.poll("c").offers
        assert all(offer.base_version is None for offer in full)
        for offer in full:
            assert hand.replicas["c"].receive(offer)
        for name in ("a", "b", "c"):
            hand.adopt(name)
    assert "c" in hand.protocol.members


@pytest.mark.parametrize(
    "payload",
    [np.broadcast_to(np.zeros(1, np.uint8), 2**40), np.zeros(2**24, np.uint8)],
    ids=["without memory", "contiguous"],
)
def test_a_payload_that_is_too_long_is_not_copied(payload: np.ndarray) -> None:
    hand = fleet()
    message = replace(hand.capture("c", 1), payload=payload)
    tracemalloc.start()
    try:
        send(hand, message)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert hand.refused() == ["corrupt"]
