"""What a learner makes of offers: old, damaged, encoded, of a replaced syncer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.diloco.codec import digest
from app.diloco.messages import Offer
from tests.unit.lone import NUMEL, adopt, books, capture, full, level, replica_of, steps
from tests.unit.tiny import Hand


def test_a_newer_offer_takes_the_older_one_s_place_with_what_that_contained() -> None:
    replica = replica_of("overwrite")
    steps(replica, 3)
    capture(replica, 1, 0)
    assert replica.receive(full(1, 10.0, (1, 1)))
    assert replica.report(1.0, 0.0, False).held == (1,)
    assert replica.receive(full(2, 20.0))
    assert replica.adopt() == [0]
    assert replica.adopt() == []
    assert books(replica) == (0, 0, {}, 0)
    assert (level(replica), replica.fragments[0].version) == (20.0, 2)


def test_offers_that_are_old_or_of_a_replaced_syncer_change_nothing() -> None:
    replica = replica_of("overwrite")
    adopt(replica, full(2, 20.0))
    assert not replica.receive(full(2, 99.0))
    assert not replica.receive(full(1, 99.0))
    replica.hear(2, ())
    assert not replica.receive(full(3, 99.0, epoch=1))
    assert replica.adopt() == []
    assert replica.report(1.0, 0.0, False).need_full == ()


@pytest.mark.parametrize(
    "damage",
    [
        {"digest": "0" * 32},
        {"payload": np.zeros(7, np.uint8)},
        {"payload": np.zeros(4 * NUMEL + 4, np.uint8)},
        {"base_version": 0, "codec": "int1"},
        {"base_version": 0, "codec": "bf16"},
    ],
)
def test_a_damaged_offer_is_refused_and_asked_for_in_full(damage: dict[str, object]) -> None:
    replica = replica_of("overwrite")
    assert not replica.receive(replace(full(1, 10.0), **damage))  # type: ignore[arg-type]
    assert replica.adopt() == []
    assert replica.report(1.0, 0.0, False).need_full == (0,)
    adopt(replica, full(1, 10.0))
    assert replica.report(1.0, 0.0, False).need_full == ()


def test_a_change_for_another_base_is_left_aside() -> None:
    replica = replica_of("overwrite")
    change = replace(full(4, 10.0), base_version=3, codec="bf16", payload=np.zeros(2 * NUMEL, np.uint8))
    assert not replica.receive(change)
    assert replica.report(1.0, 0.0, False).need_full == ()  # the next reply says what fits


def chained(missed: int, codec: str = "bf16") -> tuple[Hand, Offer]:
    """a makes versions of the one fragment alone; b receives none of them until the last reply."""
    hand = Hand(fragments=1, sync_interval=2, codec_down=codec, ring_versions=2, round_deadline_s=5.0)
    hand.join("a")
    hand.join("b")
    for _ in range(missed):
        hand.step("a", 2, change=0.0131)
        hand.poll("b")
        hand.answer("a", 0)
        hand.now += 5.0
        hand.poll("b")
        hand.publish()
        hand.adopt("a")
    return hand, hand.poll("b").offers[0]


@pytest.mark.parametrize(
    ("codec", "missed", "base"), [("bf16", 1, 0), ("bf16", 2, None), ("bf16", 3, None), ("fp32", 1, None)]
)
def test_missing_changes_or_all_of_it_whichever_is_smaller(codec: str, missed: int, base: int | None) -> None:
    hand, offer = chained(missed, codec)
    assert offer.version == missed
    assert offer.base_version == base
    assert offer.payload.size == min(4, 2 * missed if codec == "bf16" else 4) * NUMEL
    for name in ("a", "b"):
        hand.adopt(name)
        held = hand.replicas[name].fragments[0]
        assert torch.equal(held.base, hand.protocol.fragments[0].theta_hat)
        assert digest(held.base) == hand.protocol.fragments[0].digest


def test_a_wrong_digest_makes_the_next_offer_a_full_fragment() -> None:
    hand, offer = chained(1)
    assert offer.base_version == 0
    assert not hand.replicas["b"].receive(replace(offer, digest="0" * 32))
    again = hand.poll("b").offers[0]
    assert again.base_version is None
    assert hand.replicas["b"].receive(again)
    hand.replicas["b"].adopt()
    assert digest(hand.replicas["b"].fragments[0].base) == hand.protocol.fragments[0].digest


def test_the_encoding_error_is_carried_into_the_next_change() -> None:
    hand, _ = chained(6)
    fragment = hand.protocol.fragments[0]
    assert not torch.equal(fragment.theta, fragment.theta_hat)
    assert float((fragment.theta - fragment.theta_hat).norm() / (6 * 2 * 0.0131)) < 0.02
