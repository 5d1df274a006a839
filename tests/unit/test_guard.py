"""The guard against contributions of absurd size, alone and in the protocol."""

import math
import statistics

import pytest
import torch

from app.diloco.durable import whole_state
from app.diloco.fragments import gather
from app.diloco.guard import NORMAL, NormGuard
from app.diloco.messages import Refusal
from app.diloco.settings import DilocoSettings
from tests.unit.tiny import Hand, through_json

STEPS = 24
SETTINGS = DilocoSettings(guard_z=8.0)
ROUNDS, AFTER = SETTINGS.guard_rounds, SETTINGS.guard_after


def usual(i: int) -> float:
    """Norms between 1 and 1.5, in no order."""
    return 1.0 + 0.5 * ((i * 0.618034) % 1.0)


class Rounds:
    """A guard and the rounds that it sees, each learner answering each of them."""

    def __init__(self, threshold: float = 8.0, rounds: int = 0, learners: int = 4) -> None:
        self.guard = NormGuard(DilocoSettings(guard_z=threshold))
        self.learners, self.round = learners, 0
        for i in range(rounds):
            assert all(self.next([usual(i * learners + m) for m in range(learners)]))

    def next(self, norms: list[float], steps: int = STEPS) -> list[bool]:
        """Who passes the next round, in which learner m answers with norms[m]."""
        self.round += 1
        return [self.again(m, norm, steps) for m, norm in enumerate(norms)]

    def again(self, learner: int, norm: float, steps: int = STEPS) -> bool:
        return self.guard.admits(f"learner-{learner}", (1, self.round), norm, steps)


def expected_score(seen: list[list[tuple[float, int]]], norm: float, steps: int) -> float:
    """From the (norm, steps) of each learner: the formula of `docs/algorithm.md`."""

    def middle(own: list[list[float]]) -> float:
        return statistics.median_low([statistics.median(figures) for figures in own])

    rates = [[math.log(n / s) for n, s in own] for own in seen]
    usual_rate = middle(rates)
    mad = middle([[abs(rate - usual_rate) for rate in own] for own in rates])
    usual_steps = middle([[float(s) for _, s in own] for own in seen])
    return 0.6745 * (math.log(norm / max(steps, usual_steps)) - usual_rate) / max(mad, 0.1)


@pytest.mark.parametrize("learners", [1, 2, 3, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_the_score_is_the_robust_z_score_of_the_log(learners: int, wide: bool) -> None:
    rounds = Rounds()
    seen: list[list[tuple[float, int]]] = [[] for _ in range(learners)]
    for i in range(2 * ROUNDS):
        rounds.round += 1
        for m, own in enumerate(seen):
            norm, steps = usual(i + 3 * m), 10 + (7 * i + m) % 5
            if wide:
                norm **= 6
            rounds.again(m, norm, steps)
            own.append((norm, steps))
    known = [own[-ROUNDS - 1 :] for own in seen]
    for norm, steps in ((7.0, 12), (0.5, 12), (7.0, 3), (7.0, 48)):
        assert rounds.guard.score(norm, steps) == pytest.approx(expected_score(known, norm, steps))
    assert pytest.approx(0.6745) == NORMAL
    assert pytest.approx(0.1) == SETTINGS.guard_spread


def test_what_is_far_too_large_is_refused_and_the_usual_goes_on() -> None:
    rounds = Rounds(rounds=ROUNDS)
    for norm in (1e3, 1e30, 50.0):
        assert rounds.next([norm, 1.2, 1.1, 1.4]) == [False, True, True, True]


def test_a_small_norm_does_no_harm() -> None:
    assert Rounds(rounds=ROUNDS).next([1e-9, 0.0, 1.2, 1.1]) == [True] * 4


@pytest.mark.parametrize("learners", [1, 2, 4, 16])
def test_before_enough_rounds_are_seen_everything_passes(learners: int) -> None:
    assert Rounds(rounds=AFTER - 1, learners=learners).next([1e6] * learners) == [True] * learners
    assert Rounds(rounds=AFTER, learners=learners).next([1e6]) == [False]


def warming_up(round_: int, first_steps: int, warmup: int) -> tuple[float, int]:
    """Norm and steps of a fragment's contribution to this round (from 0) while the learning rate rises.

    A fragment is due for the first time after `first_steps` steps; ‖d‖ is proportional to the sum of the learning
    rates, and 0.9 at full rate.
    """
    stop = first_steps + round_ * STEPS
    steps = first_steps if round_ == 0 else STEPS
    return 0.9 * sum(min(1.0, (k + 1) / warmup) for k in range(stop - steps, stop)) / STEPS, steps


@pytest.mark.parametrize("learners", [1, 2, 4, 9, 16, 32])
@pytest.mark.parametrize("warmup", [1, 24, 80, 400])
@pytest.mark.parametrize("first_steps", [3, 12, 24])
def test_healthy_learners_pass_while_the_learning_rate_warms_up(learners: int, warmup: int, first_steps: int) -> None:
    rounds = Rounds()
    for i in range(3 * ROUNDS):
        norm, steps = warming_up(i, first_steps, warmup)
        assert all(rounds.next([norm * (0.9 + 0.1 * usual(i + m)) for m in range(learners)], steps))
    assert not rounds.again(0, 5.0)


@pytest.mark.parametrize("learners", [9, 16])
def test_norms_as_measured_in_a_first_round_of_three_steps(learners: int) -> None:
    rounds = Rounds()
    for norm, steps in [(0.008, 3), (0.85, STEPS), (0.9, STEPS), (0.9, STEPS), (0.9, STEPS), (0.9, STEPS)]:
        assert all(rounds.next([norm * (0.9 + 0.1 * usual(m)) for m in range(learners)], steps))
    assert not rounds.again(0, 4.0)


def test_even_learners_do_not_refuse_each_other() -> None:
    rounds = Rounds()
    for _ in range(ROUNDS):
        assert all(rounds.next([1.0] * 4))
    assert rounds.next([3.0, 4.0]) == [True, False]


@pytest.mark.parametrize("periods", [2, 3, 40])
def test_the_work_of_more_steps_may_be_larger_in_proportion(periods: int) -> None:
    rounds = Rounds(rounds=ROUNDS)
    assert rounds.next([1.5 * periods, 50.0 * periods], periods * STEPS) == [True, False]
    assert rounds.next([50.0], STEPS // 2) == [False]  # fewer steps are no excuse, and no charge


@pytest.mark.parametrize("learners", [1, 3, 4])
def test_a_change_that_everybody_makes_becomes_usual(learners: int) -> None:
    rounds = Rounds(rounds=ROUNDS, learners=learners)
    admitted = [rounds.next([100.0 * usual(i * learners + m) for m in range(learners)]) for i in range(ROUNDS)]
    assert not any(admitted[0])
    assert all(admitted[ROUNDS // 2 + 1])


@pytest.mark.parametrize(("learners", "broken"), [(2, 1), (3, 1), (4, 2), (5, 2), (16, 8)])
def test_half_of_the_learners_never_become_usual(learners: int, broken: int) -> None:
    rounds = Rounds(rounds=ROUNDS, learners=learners)
    for i in range(4 * ROUNDS):
        norms = [1e4] * broken + [usual(i + m) for m in range(learners - broken)]
        assert rounds.next(norms) == [False] * broken + [True] * (learners - broken)


def test_who_answers_often_has_no_more_votes() -> None:
    rounds = Rounds(rounds=ROUNDS, learners=3)
    for i in range(4 * ROUNDS):  # learner 0 in every round, one of the others in each
        assert rounds.next([1e4]) == [False]
        assert rounds.again(1 + i % 2, usual(i))


def test_who_left_has_no_vote_any_more() -> None:
    """Three learners were there at the start with norms that are nothing to what is usual later."""
    rounds = Rounds(learners=5)
    for _ in range(ROUNDS):
        rounds.next([0.01, 0.01, 0.01, 0.01, 0.01])
    for norm in (0.02, 0.05, 0.1):  # and two go on
        for _ in range(ROUNDS):
            assert rounds.next([norm, norm]) == [True, True]
    assert rounds.guard.usual == pytest.approx(0.1)


def test_zero_is_no_guard() -> None:
    assert Rounds(0.0, rounds=ROUNDS).next([1e30]) == [True]


def test_a_late_norm_is_known_and_counts_as_no_round() -> None:
    rounds = Rounds(rounds=1, learners=1)
    for i in range(10):
        rounds.guard.remember(f"late-{i}", 1e6, STEPS)
    assert rounds.guard.usual > 1e5
    assert all(rounds.next([usual(i)])[0] for i in range(AFTER - 1))
    assert rounds.next([1e12]) == [False]


def one_round(hand: Hand, change_of_b: float, times: int = 1) -> float:
    """The next round, b answering first, after so many times a's steps. Returns how far Θ of its fragment moved."""
    for name, change, steps in (("b", change_of_b, 2 * times), ("a", 1.0, 2)):
        hand.step(name, steps, change=change)
        hand.poll(name)
    p = next(iter(hand.protocol.rounds))
    before = hand.protocol.fragments[p].theta.clone()
    hand.answer("b", p)
    hand.answer("a", p)
    hand.publish()
    for name in ("a", "b"):
        hand.adopt(name)
    return float((hand.protocol.fragments[p].theta - before).norm())


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_the_protocol_refuses_and_tells_the_tape(threshold: float) -> None:
    hand = Hand(guard_z=threshold)
    hand.join("a")
    hand.join("b")
    usual_move = [one_round(hand, 1.1) for _ in range(2 * AFTER)][-1]
    moved = one_round(hand, 1e4)
    refused = [note for note in hand.notes("refused") if note["reason"] == "outlier"]
    if threshold:
        assert hand.protocol.refusals[Refusal.OUTLIER] == 1
        assert [note["learner"] for note in refused] == ["b"]
        assert refused[0]["norm"] > 1000 * refused[0]["usual"] > 0
        assert moved == pytest.approx(usual_move, rel=0.2)
    else:
        assert refused == []
        assert moved > 100 * usual_move
    assert hand.protocol.books.balance().exact


@pytest.mark.parametrize("learners", [9, 16])
def test_the_protocol_refuses_nobody_while_the_learning_rate_warms_up(learners: int) -> None:
    """A fragment is due for the first time after 6 steps at small learning rates, and then after 24 more."""
    hand = Hand(fragments=4, sync_interval=24, adopt="overwrite", guard_z=8.0)
    names = [f"learner-{m}" for m in range(learners)]
    for name in names:
        hand.join(name)

    def six_steps(after: int, change_of_first: float) -> None:
        rate = min(1.0, (after + 1) / 80)
        for m, name in enumerate(names):
            change = rate * (0.9 + 0.1 * usual(m + after))
            hand.step(name, 6, change=change if m else change * change_of_first)
        for name in names:
            hand.poll(name)
        for p in sorted(hand.protocol.rounds):
            for name in names:
                hand.answer(name, p)
        hand.publish()
        for name in names:
            hand.adopt(name)

    healthy = (AFTER + 3) * 24
    for after in range(0, healthy, 6):
        six_steps(after, 1.0)
    assert hand.refused() == []
    for after in range(healthy, healthy + 24, 6):
        six_steps(after, 100.0)
    refused = [(note["reason"], note["learner"], note["fragment"]) for note in hand.notes("refused")]
    assert sorted(refused) == [("outlier", names[0], p) for p in range(4)]


@pytest.mark.parametrize(("learners", "broken"), [(2, 1), (3, 1), (5, 2)])
@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_broken_learners_that_are_always_first_are_never_merged(learners: int, broken: int, gamma: float) -> None:
    """Rounds close at their quorum: of the healthy ones only the first gets its answer in, the others are late."""
    hand = Hand(fragments=1, sync_interval=2, grace_safety=gamma, guard_z=8.0)
    names = [f"learner-{m}" for m in range(learners)]
    for name in names:
        hand.join(name)
    broken_from, rounds = 2 * AFTER, 2 * AFTER + 4 * ROUNDS
    for r in range(rounds):
        before = hand.protocol.fragments[0].theta
        for m, name in enumerate(names):
            hand.step(name, 2, change=1e4 if m < broken and r >= broken_from else 0.5 + 0.5 * usual(r + m))
        for name in names:
            hand.poll(name)
        given = [hand.capture(name, 0) for name in names]
        for each in given:
            hand.arrive(each)
        hand.publish()
        for name in names:
            hand.adopt(name)
        assert float((hand.protocol.fragments[0].theta - before).abs().max()) < 100.0
    for name in names[:broken]:
        reasons = [note["reason"] for note in hand.notes("refused") if note["learner"] == name]
        assert reasons.count("outlier") == rounds - broken_from
    healthy = [note["reason"] for note in hand.notes("refused") if note["learner"] in names[broken:]]
    assert set(healthy) == ({"late"} if gamma == 0.0 else set())
    assert hand.protocol.fragments[0].version == rounds


@pytest.mark.parametrize(("change", "times", "refused"), [(5.5, 1, 1), (1.1, 5, 0)])
def test_the_protocol_knows_of_how_many_steps_it_is(change: float, times: int, refused: int) -> None:
    """The same size in all: of as many steps as usual, or of five times as many."""
    hand = Hand(guard_z=8.0)
    hand.join("a")
    hand.join("b")
    for _ in range(2 * AFTER):
        one_round(hand, 1.1)
    one_round(hand, change, times)
    assert hand.protocol.refusals[Refusal.OUTLIER] == refused


@pytest.mark.parametrize("adopt", ["overwrite", "mix", "rebase"])
@pytest.mark.parametrize("newer", [False, True])
def test_a_refused_outlier_starts_again_from_the_global_value(adopt: str, newer: bool) -> None:
    """Also when a newer version replaces the one that told it so."""
    hand = Hand(fragments=1, sync_interval=2, adopt=adopt, codec_down="int4", codec_up="int4", codec_block=16)
    for name in ("a", "b"):
        hand.join(name)
    for _ in range(2 * AFTER):
        one_round(hand, 1.1)
    for name, change in (("a", 1.0), ("b", 1e4)):
        hand.step(name, 2, change=change)
        hand.poll(name)
    for name in ("b", "a"):
        hand.answer(name, 0)
    hand.publish()
    assert hand.refused()[-1] == "outlier"
    if newer:
        hand.ask("b")  # receives the version, and has not adopted it yet when the next one comes
        hand.adopt("a")
        hand.step("a", 2)
        hand.poll("a")
        hand.answer("a", 0)
        hand.now += hand.settings.round_deadline_s
        hand.poll("a")
        hand.publish()
    hand.adopt("b")
    held, fragment = hand.replicas["b"].fragments[0], hand.protocol.fragments[0]
    assert held.version == fragment.version
    assert torch.equal(gather(hand.protocol.layout.fragments[0], hand.parameters["b"]), fragment.theta_hat)
    assert held.outstanding == 0
    hand.adopt("b")
    assert not fragment.outliers
    for name in ("a", "b"):
        hand.step(name, 2, change=1.0)  # like everybody again
        hand.poll(name)
    assert hand.answer("b", 0).c_steps == 2
    assert hand.refused()[-1] == "outlier"
    assert hand.protocol.refusals[Refusal.OUTLIER] == 1
    assert hand.protocol.books.balance().exact


@pytest.mark.parametrize("compacted", [False, True])
def test_a_restarted_syncer_knows_what_is_usual(compacted: bool) -> None:
    """Else the first absurd contribution after a restart would be merged."""
    hand = Hand(guard_z=8.0)
    hand.join("a")
    hand.join("b")
    for _ in range(2 * AFTER):
        usual_move = one_round(hand, 1.1)
    if compacted:
        hand.state, hand.journal = through_json(whole_state(hand.protocol)), []
    before = [guard.state() for guard in hand.protocol.guards]
    hand.restart()
    assert [guard.state() for guard in hand.protocol.guards] == before
    assert one_round(hand, 1e4) == pytest.approx(usual_move, rel=0.2)
    assert hand.refused() == ["outlier"]
