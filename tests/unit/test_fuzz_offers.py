"""Whatever comes back from a syncer, a learner keeps what it has unless the new value is what its digest says."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.diloco.events import Grant
from app.diloco.fragments import gather
from app.diloco.messages import Reply, Welcome
from app.diloco.replica import Replica
from app.diloco.whole import is_reply, is_welcome
from tests.fuzz import arrays, efforts
from tests.unit.test_fuzz_messages import Fault, faults, fleet, garbled, works
from tests.unit.tiny import Hand, tiny_layout, tiny_parameters

DIALS: dict[str, Any] = {"codec_down": "int8", "codec_up": "int8", "codec_block": 16}


def replied(hand: Hand) -> Reply:
    """What c is told after a merge without it."""
    works(hand, "a", "b")
    reply = hand.poll("c")
    assert reply.offers
    return reply


def hear(hand: Hand, reply: Any) -> None:
    """As a learner's line does."""
    replica = hand.replicas["c"]
    if not is_reply(reply, hand.settings.fragments) or reply.epoch < replica.sender.epoch:
        return
    asks = replica.hear(reply.epoch, reply.asks)
    for offer in reply.offers:
        replica.receive(offer)
    for ask in asks:
        replica.contribute(ask, 1.0, 0.5, False)
    replica.adopt()


def is_well(hand: Hand) -> None:
    """It has finite weights, and what it holds is what the syncer has made."""
    for tensor in hand.parameters["c"].values():
        assert bool(torch.isfinite(tensor).all())
    made = {(p, 0): hand.state.tensors[f"{p}.theta"] for p in range(hand.settings.fragments)}
    for record in hand.journal:
        if record.meta["kind"] == "merge":
            made[record.meta["fragment"], record.meta["version"]] = record.tensors["theta_hat"]
    for p, held in enumerate(hand.replicas["c"].fragments):
        assert torch.equal(held.base, made[p, held.version])


@efforts
def test_no_reply_harms(effort: settings) -> None:
    @effort
    @given(st.lists(faults, min_size=1, max_size=3))
    def holds(letters: list[list[Fault]]) -> None:
        hand = fleet(**DIALS)
        honest = replied(hand)
        for wrong in letters:
            hear(hand, garbled(honest, wrong))
        is_well(hand)

    holds()


@efforts
def test_no_offer_harms(effort: settings) -> None:
    """Whole as a message, wrong in what it says."""

    @effort
    @given(
        st.fixed_dictionaries(
            {},
            optional={
                "version": st.integers(0, 10),
                "epoch": st.integers(0, 2),
                "base_version": st.one_of(st.none(), st.integers(0, 5)),
                "codec": st.sampled_from(["fp32", "bf16", "int8", "int4", "none"]),
                "payload": st.one_of(arrays, st.binary(max_size=200).map(lambda data: np.frombuffer(data, np.uint8))),
                "digest": st.sampled_from(["", "0" * 64]),
            },
        )
    )
    def holds(wrong: dict[str, Any]) -> None:
        hand = fleet(**DIALS)
        honest = replied(hand)
        wrong = {"digest": "0" * 64} | wrong
        hear(hand, replace(honest, offers=tuple(replace(offer, **wrong) for offer in honest.offers)))
        assert [held.version for held in hand.replicas["c"].fragments] == [0, 0]
        is_well(hand)
        hear(hand, hand.poll("c"))  # it goes on with the next good one
        assert [held.version for held in hand.replicas["c"].fragments] == [
            fragment.version for fragment in hand.protocol.fragments
        ]
        is_well(hand)

    holds()


def welcomed(hand: Hand) -> Welcome:
    hand.greet(hand.hello("d", "token"))
    welcome: Welcome = hand.last(Grant).welcome
    return welcome


def check_welcome(hand: Hand, welcome: Any) -> None:
    """It is refused in one way, or the learner begins with the syncer's values."""
    parameters = tiny_parameters(99)
    try:
        Replica(tiny_layout(2), hand.settings, parameters, welcome)
    except ValueError:
        return
    assert is_welcome(welcome, 2)
    for fragment, made in zip(tiny_layout(2).fragments, hand.protocol.fragments, strict=True):
        assert torch.equal(gather(fragment, parameters), made.theta_hat)


@efforts
def test_no_welcome_harms(effort: settings) -> None:
    @effort
    @given(faults)
    def holds(wrong: list[Fault]) -> None:
        hand = fleet()
        check_welcome(hand, garbled(welcomed(hand), wrong))

    holds()


@efforts
def test_no_offer_in_a_welcome_harms(effort: settings) -> None:
    @effort
    @given(faults, st.integers(0, 1))
    def holds(wrong: list[Fault], which: int) -> None:
        hand = fleet()
        welcome = welcomed(hand)
        offers = list(welcome.offers)
        offers[which] = garbled(offers[which], wrong)
        check_welcome(hand, replace(welcome, offers=tuple(offers)))

    holds()
