"""The end of a run: one last round of all fragments, whatever fails."""

import math

import numpy as np
import pytest

from app.diloco.events import (
    Finish,
    Join,
    Lost,
    Published,
    PublishFailed,
    Tick,
)
from tests.unit.tiny import Hand, opened


def at_the_end(**dials: object) -> Hand:
    """a and b have processed the budget with no round open: the last rounds are."""
    hand = Hand(budget=20, **dials)
    for name in ("a", "b"):
        hand.join(name)
    for name in ("a", "b"):
        hand.step(name, 1)
        hand.poll(name, idle=True)
    assert {p: r.final for p, r in hand.protocol.rounds.items()} == {0: True, 1: True}
    return hand


def answer_all(hand: Hand, name: str) -> None:
    for ask in hand.ask(name):
        hand.arrive(hand.replicas[name].contribute(ask, 1.0, 0.5, True))


def test_the_budget_brings_a_last_round_of_all_fragments_and_then_the_end() -> None:
    hand = at_the_end()
    assert hand.poll("a").finish
    assert hand.notes("finish")[0]["reason"] == "budget"
    for name in ("a", "b"):
        answer_all(hand, name)
    assert not hand.ended
    hand.publish()
    assert hand.ended
    assert [fragment.version for fragment in hand.protocol.fragments] == [1, 1]
    balance = hand.protocol.books.balance()
    assert (balance.merged, balance.outstanding) == (20 * hand.protocol.layout.numel, 0)
    assert hand.protocol.next_wake == math.inf


def last_of_two(reason: str, **dials: object) -> tuple[Hand, list[np.ndarray], list[np.ndarray]]:
    """c gives nothing to the last round; a and b moved by 0.25 and 0.75. Θ and b before it, in float64."""
    hand = Hand(outer_momentum=0.5, outer_lr=0.25, merge="mean", **dials)
    for name in ("a", "b", "c"):
        hand.join(name)
    for change in (0.125, 0.5):  # the second time there is momentum
        for name in ("a", "b"):
            hand.step(name, 4, change=change)
            hand.poll(name)
        for name in ("a", "b"):
            answer_all(hand, name)
        hand.now += hand.settings.round_deadline_s
        hand.feed(Tick())
        hand.publish()
        for name in ("a", "b"):
            hand.ask(name)
            hand.adopt(name)
    before = [(f.theta.double().numpy(), f.momentum.double().numpy()) for f in hand.protocol.fragments]
    hand.step("a", 1, change=0.25)
    hand.step("b", 1, change=0.75)
    hand.poll("c")  # it lives
    hand.feed(Finish(reason, 20.0))
    for name in ("a", "b"):
        answer_all(hand, name)
    hand.now += 20.0
    hand.feed(Tick())
    hand.publish()
    assert hand.ended
    return hand, [theta for theta, _ in before], [momentum for _, momentum in before]


@pytest.mark.parametrize(
    ("reason", "rule"), [("budget", "mean"), ("budget", "outer"), ("stop", "mean"), ("stop", "outer")]
)
def test_at_the_budget_the_last_round_gives_the_mean_of_all_and_leaves_the_momentum(reason: str, rule: str) -> None:
    """Two of three gave v = −0.25 and −0.75: Θ + ⅔ · 0.5; otherwise Nesterov's step."""
    hand, thetas, momenta = last_of_two(reason, last_round=rule)
    v = -0.5
    for fragment, theta, b in zip(hand.protocol.fragments, thetas, momenta, strict=True):
        assert np.abs(b).min() > 0.1
        mean = (reason, rule) == ("budget", "mean")
        later = b if mean else 0.5 * b + v
        want = theta - 2 / 3 * v if mean else theta - 0.25 * (v + 0.5 * later)
        np.testing.assert_allclose(fragment.theta.numpy(), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(fragment.momentum.numpy(), later, rtol=1e-5, atol=1e-6)


def test_the_mean_does_not_ask_how_long_ago_a_learner_was_merged() -> None:
    """b's steps of three rounds weigh no more than a's single one; its steps of twice the tokens count twice."""
    hand = Hand(budget=10**9, merge="mean")
    for name in ("a", "b"):
        hand.join(name)
    theta = [fragment.theta.double().numpy() for fragment in hand.protocol.fragments]
    hand.step("a", 1, tokens=10, change=0.3)
    hand.step("b", 3, tokens=20, change=0.2)
    hand.feed(Finish("budget", 20.0))
    for name in ("a", "b"):
        hand.poll(name, idle=True)
    for name in ("a", "b"):
        answer_all(hand, name)
    hand.publish()
    for fragment, before in zip(hand.protocol.fragments, theta, strict=True):
        want = before + (10 * 0.3 + 20 * 0.6) / 30
        np.testing.assert_allclose(fragment.theta.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("reason", "versions"), [("budget", [1, 1]), ("stop", [0, 0])])
def test_at_the_budget_those_who_are_left_are_enough(reason: str, versions: list[int]) -> None:
    """Two are wanted for a merge and one has died: a run that may go on keeps to that, the end of one does not."""
    hand = Hand(budget=10**9, min_quorum=2)
    for name in ("a", "b"):
        hand.join(name)
    hand.feed(Lost("b", hand.replicas["b"].sender.incarnation, "died"))
    hand.step("a", 1)
    hand.feed(Finish(reason, 20.0))
    answer_all(hand, "a")
    hand.publish()
    hand.now += 20.0
    hand.feed(Tick())
    assert hand.ended
    assert [fragment.version for fragment in hand.protocol.fragments] == versions


def test_a_fragment_whose_round_is_open_at_the_end_gets_its_last_round_after_it() -> None:
    hand = opened()
    hand.feed(Finish("budget", 20.0))
    assert {p: r.final for p, r in hand.protocol.rounds.items()} == {0: True, 1: False}
    for name in ("a", "b"):
        answer_all(hand, name)
    hand.publish()
    for name in ("a", "b"):
        hand.adopt(name)
        hand.step(name)  # the step that was under way
    assert {p: r.final for p, r in hand.protocol.rounds.items()} == {1: True}
    for name in ("a", "b"):
        answer_all(hand, name)
    hand.publish()
    assert hand.ended
    assert [fragment.version for fragment in hand.protocol.fragments] == [1, 2]


def test_the_last_round_waits_for_all_but_only_until_its_deadline() -> None:
    hand = at_the_end()
    answer_all(hand, "a")
    hand.now += 5
    hand.feed(Tick())
    assert not hand.jobs  # quorum and grace do not close a last round
    wake = hand.protocol.next_wake
    assert wake == 100 + hand.settings.final_deadline_s
    hand.now = wake
    hand.feed(Tick())
    hand.publish()
    assert hand.ended
    assert hand.protocol.books.balance().outstanding == 0
    assert "unfinished" in hand.protocol.books.balance().discarded


def test_a_round_that_is_open_at_the_end_closes_within_the_deadline() -> None:
    hand = opened(min_quorum=2, round_deadline_s=600.0)
    hand.answer("a", 1)
    hand.feed(Finish("stopped", 3.0))
    assert hand.protocol.next_wake == hand.now + 3.0
    hand.now += 3.0
    hand.feed(Tick())
    assert hand.ended
    assert hand.notes("ended")[0]["reason"] == "stopped"


def test_a_failed_journal_does_not_hold_up_the_end() -> None:
    hand = at_the_end()
    for name in ("a", "b"):
        answer_all(hand, name)
    for job in list(hand.jobs):
        hand.feed(PublishFailed(job, "disk full"))
    hand.jobs.clear()
    while not hand.ended:
        assert hand.protocol.next_wake > hand.now
        hand.now = hand.protocol.next_wake
        assert hand.now <= 100 + hand.settings.final_deadline_s + hand.settings.journal_retry_s
        hand.feed(Tick())
        for job in list(hand.jobs):
            hand.feed(PublishFailed(job, "disk full"))
        hand.jobs.clear()
    balance = hand.protocol.books.balance()
    assert (balance.merged, balance.outstanding) == (0, 0)
    assert sum(balance.discarded.values()) == balance.processed


def test_a_journal_that_never_answers_does_not_hold_up_the_end_for_ever() -> None:
    hand = at_the_end()
    for name in ("a", "b"):
        answer_all(hand, name)
    assert hand.jobs
    for _ in range(3):
        if hand.ended:
            break
        assert hand.now < hand.protocol.next_wake < math.inf
        hand.now = hand.protocol.next_wake
        hand.feed(Tick())
    assert hand.ended
    assert hand.now == 100 + 2 * hand.settings.final_deadline_s
    result = hand.jobs[0].run()
    hand.feed(Published(result))  # it answers at last
    assert hand.protocol.books.balance().outstanding == 0


def test_nobody_joins_a_run_that_has_ended() -> None:
    hand = Hand()
    hand.feed(Finish("stopped", 1.0))
    assert hand.ended
    hand.feed(Join(hand.hello("a", "t")))
    assert hand.denials == ["the run has ended"]


def test_a_dead_learner_does_not_hold_the_last_round() -> None:
    hand = at_the_end()
    answer_all(hand, "a")
    hand.feed(Lost("b", 1, "exit"))
    hand.publish()
    assert hand.ended
    assert hand.now == 100


def test_a_syncer_that_restarts_in_the_last_round_waits_for_the_learners_it_knows() -> None:
    hand = at_the_end()
    for name in ("a", "b"):
        answer_all(hand, name)
    job, lost = hand.jobs
    hand.jobs = [job]
    hand.publish()
    hand.restart()
    hand.feed(Tick())
    assert hand.protocol.finishing is not None  # the journal knows the tokens
    assert not hand.protocol.ended
    for name in ("a", "b"):
        hand.adopt(name)
        answer_all(hand, name)
    assert [new.epoch for new in hand.jobs] == [2]
    hand.publish()
    assert hand.ended
    assert hand.protocol.fragments[lost.fragment.index].version == 1
    assert hand.protocol.books.balance().merged == 20 * hand.protocol.layout.numel
