"""A learner that leaves hands in what it has, and nobody waits for it longer than for others."""

import dataclasses

import pytest

from app.diloco.events import Lost, PublishFailed, Tick
from app.diloco.handing_in import TRIES
from tests.unit.tiny import Hand, opened

GRACE_S = 5.0
"""Longer than the grace window of any round here."""


def leave(hand: Hand, name: str) -> None:
    hand.replicas[name].leaving = True
    hand.poll(name, idle=True)


def hand_in(hand: Hand, name: str) -> None:
    """Answer all asks, and let the grace of their rounds pass."""
    for ask in hand.ask(name):
        hand.arrive(hand.replicas[name].contribute(ask, 1.0, 0.5, True))
    close(hand)
    hand.poll(name, idle=True)


def close(hand: Hand) -> None:
    """Nobody else answers: rounds end by themselves."""
    hand.now += hand.settings.round_deadline_s
    hand.feed(Tick())
    hand.publish()


def left(hand: Hand) -> list[str]:
    return [fields["learner"] for fields in hand.notes("leave") if fields["reason"] == "left"]


@pytest.mark.parametrize("others", [0, 1, 4])
def test_all_its_work_is_merged_at_once_and_then_it_is_let_go(others: int) -> None:
    hand = Hand()
    for name in ("a", *(f"b{i}" for i in range(others))):
        hand.join(name)
    hand.step("a", 1)
    hand.poll("a")
    assert not hand.protocol.rounds  # nothing was due
    leave(hand, "a")
    assert sorted(hand.protocol.rounds) == [0, 1]
    assert all(len(round_.asked) == 1 + others for round_ in hand.protocol.rounds.values())
    hand_in(hand, "a")
    assert left(hand) == ["a"]
    assert hand.poll("a", idle=True).fenced
    balance = hand.protocol.books.balance()
    assert balance.exact
    assert (balance.merged, balance.outstanding, balance.discarded) == (balance.processed, 0, {})
    (samples,) = [entry for entry in hand.protocol.books.consumed() if entry.learner == "a"]
    assert samples.ended


def test_who_has_nothing_is_let_go_at_once() -> None:
    hand = Hand()
    for name in ("a", "b"):
        hand.join(name)
    leave(hand, "a")
    assert left(hand) == ["a"]
    assert not hand.protocol.rounds
    assert list(hand.protocol.members) == ["b"]


def test_a_round_that_is_open_serves_unless_it_was_answered_before() -> None:
    hand = opened()  # fragment 1, a and b have made two steps
    hand.answer("a", 1)
    hand.step("a", 1)
    leave(hand, "a")
    hand_in(hand, "a")  # fragment 0, and the round of fragment 1 closes with what was given before
    assert left(hand) == []
    hand.adopt("a")
    assert list(hand.protocol.rounds) == [1]
    hand_in(hand, "a")
    assert left(hand) == ["a"]
    assert hand.protocol.books.balance().discarded == {}

    hand = opened()
    leave(hand, "b")
    assert sorted(hand.protocol.rounds) == [0, 1]
    assert hand.protocol.rounds[1].id == 1
    hand_in(hand, "b")
    assert left(hand) == ["b"]


def test_what_comes_too_late_for_one_round_is_taken_by_the_next() -> None:
    hand = opened()  # fragment 1
    leave(hand, "a")
    given = {ask.fragment: hand.replicas["a"].contribute(ask, 1.0, 0.5, True) for ask in hand.ask("a")}
    hand.arrive(given[0])
    hand.answer("b", 1)
    hand.now += GRACE_S
    hand.feed(Tick())
    hand.arrive(given[1])
    assert [fields["reason"] for fields in hand.notes("refused")] == ["late"]
    hand.publish()
    hand.poll("a", idle=True)
    hand.adopt("a")
    assert left(hand) == []
    assert "a" in hand.protocol.rounds[1].waiting
    hand_in(hand, "a")
    assert left(hand) == ["a"]
    assert hand.protocol.books.balance().discarded == {}


def test_what_is_refused_over_and_over_is_not_asked_for_for_ever() -> None:
    hand = opened()
    leave(hand, "a")
    for _ in range(TRIES):
        assert left(hand) == []
        for ask in hand.ask("a"):
            given = hand.replicas["a"].contribute(ask, 1.0, 0.5, True)
            hand.arrive(dataclasses.replace(given, digest="0" * 64))
        close(hand)
        hand.poll("a", idle=True)
    assert left(hand) == ["a"]
    balance = hand.protocol.books.balance()
    assert balance.exact
    assert (balance.merged, set(balance.discarded)) == (0, {"died"})


def test_while_the_journal_fails_nobody_is_let_go_and_who_has_no_time_goes() -> None:
    hand = opened()
    hand.answer("a", 1)
    hand.answer("b", 1)
    hand.feed(PublishFailed(hand.jobs[-1], "disk full"))
    leave(hand, "a")
    assert list(hand.protocol.rounds) == [1]
    assert left(hand) == []
    hand.feed(Lost("a", 1, "left"))
    assert left(hand) == ["a"]
    assert hand.protocol.books.balance().exact


def test_a_syncer_that_starts_anew_takes_it_too() -> None:
    hand = opened()
    hand.restart()
    leave(hand, "a")
    hand.adopt("a")
    hand_in(hand, "a")
    assert left(hand) == ["a"]
    assert hand.protocol.books.balance().exact
