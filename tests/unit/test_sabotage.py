"""What a learner does to its messages on purpose, and what the syncer makes of them."""

import time

import pytest

from actors.sabotage import Sabotage, spoilt
from app.config.chaos import CORRUPTIONS
from tests.unit.tiny import opened


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "fp4"])
@pytest.mark.parametrize("how", CORRUPTIONS)
def test_whatever_is_spoilt_is_refused(how: str, codec: str) -> None:
    hand = opened(codec_up=codec, codec_block=16)
    earlier = hand.answer("b", 1)
    hand.answer("a", 1)
    hand.publish()
    for name in ("a", "b"):
        hand.adopt(name)
        hand.step(name, 2)
        hand.poll(name)
    given = hand.capture("b", 0)
    before = given.payload.copy()
    hand.arrive(spoilt(given, how, earlier))
    assert hand.refused() == ["late" if how == "replay" else "corrupt"]
    assert (given.payload == before).all()


def test_a_base_ahead_is_garbage_where_that_version_exists() -> None:
    hand = opened(round_deadline_s=5.0)
    hand.answer("a", 1)
    hand.now += 5.0
    hand.poll("b")
    hand.publish()
    hand.step("a", 4)
    hand.poll("a")
    reply = hand.poll("b")  # tells of version 1 of fragment 1, which does not arrive
    asks = {ask.fragment: ask for ask in hand.replicas["b"].hear(reply.epoch, reply.asks)}
    given = hand.replicas["b"].contribute(asks[1], 1.0, 0.5, False)
    lie = spoilt(given, "ahead", given)
    assert lie.base_version == hand.protocol.fragments[1].version == 1
    hand.arrive(lie)
    assert hand.refused() == ["corrupt"]


def test_it_lasts_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    given = opened().capture("a", 1)
    sabotage = Sabotage()
    assert not sabotage.muted
    assert sabotage.passed(given) is given
    sabotage.mute(5.0)
    sabotage.corrupt("version", 3.0)
    assert sabotage.muted
    assert sabotage.passed(given).base_version != given.base_version
    now = 104.0
    assert sabotage.muted
    assert sabotage.passed(given) is given
    now = 106.0
    assert not sabotage.muted


@pytest.mark.parametrize("most", [0, 3])
def test_who_keeps_sending_garbage_is_fenced_off(most: int) -> None:
    hand = opened(most_garbage=most)
    for _ in range(5):
        for name in ("a", "b"):
            if name in hand.protocol.members:
                for given in [hand.replicas[name].contribute(ask, 1.0, 0.5, False) for ask in hand.ask(name)]:
                    hand.arrive(given if name == "a" else spoilt(given, "flip", given))
        hand.publish()
        for name in ("a", "b"):
            hand.step(name, 2)
            hand.poll(name)
    assert ("b" in hand.protocol.members) == (most == 0)
    left = [note["reason"] for note in hand.notes("leave")]
    assert left == ([] if most == 0 else ["garbage"])
    assert hand.protocol.books.balance().exact
