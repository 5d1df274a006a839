"""The guard against contributions of absurd size, alone and in the protocol."""

import math
import statistics

import pytest
import torch

from app.diloco.durable import whole_state
from app.diloco.fragments import gather
from app.diloco.guard import ENOUGH, LEAST_SPREAD, NORMAL, WINDOW, NormGuard
from app.diloco.messages import Refusal
from tests.unit.tiny import Hand, through_json

STEPS = 24


def usual(i: int) -> float:
    """Norms between 1 and 1.5, in no order."""
    return 1.0 + 0.5 * ((i * 0.618034) % 1.0)


def trained(threshold: float, count: int = WINDOW) -> NormGuard:
    guard = NormGuard(threshold)
    assert all(guard.admits(usual(i), STEPS) for i in range(count))
    return guard


def test_the_score_is_the_robust_z_score_of_the_log() -> None:
    guard = trained(8.0)
    logs = [math.log(usual(i)) for i in range(WINDOW)]
    middle = statistics.median(logs)
    mad = max(statistics.median([abs(x - middle) for x in logs]), LEAST_SPREAD)
    assert guard.score(7.0, STEPS) == pytest.approx(0.6745 * (math.log(7.0) - middle) / mad)
    assert pytest.approx(0.6745) == NORMAL


def test_what_is_far_too_large_is_refused_and_the_usual_goes_on() -> None:
    guard = trained(8.0)
    for norm in (1e3, 1e30, 50.0):
        assert not guard.admits(norm, STEPS)
        assert guard.admits(1.2, STEPS)


def test_a_small_norm_does_no_harm() -> None:
    guard = trained(8.0)
    assert guard.admits(1e-9, STEPS)
    assert guard.admits(0.0, STEPS)


def test_before_enough_is_seen_everything_passes() -> None:
    guard = trained(8.0, ENOUGH - 1)
    assert guard.admits(1e6, STEPS)


def test_even_learners_do_not_refuse_each_other() -> None:
    guard = NormGuard(8.0)
    assert all(guard.admits(1.0, STEPS) for _ in range(WINDOW))
    assert guard.admits(3.0, STEPS)
    assert not guard.admits(4.0, STEPS)


@pytest.mark.parametrize("periods", [2, 3, 40])
def test_the_work_of_more_steps_may_be_larger_in_proportion(periods: int) -> None:
    guard = trained(8.0)
    assert guard.admits(1.5 * periods, periods * STEPS)
    assert not guard.admits(50.0 * periods, periods * STEPS)
    assert not guard.admits(50.0, STEPS // 2)  # fewer steps are no excuse, and no charge


def test_a_change_that_everybody_makes_becomes_usual() -> None:
    guard = trained(8.0)
    admitted = [guard.admits(100.0 * usual(i), STEPS) for i in range(WINDOW)]
    assert not admitted[0]
    assert admitted[-1]
    assert sum(admitted) >= WINDOW // 2 - 1


def test_a_minority_never_becomes_usual() -> None:
    guard = trained(8.0)
    for i in range(4 * WINDOW):  # one learner of three is broken
        assert guard.admits(usual(i), STEPS) is True
        assert guard.admits(usual(i + 7), STEPS) is True
        assert guard.admits(1e4, STEPS) is False


def test_zero_is_no_guard() -> None:
    guard = trained(0.0)
    assert guard.admits(1e30, STEPS)


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
    usual_move = [one_round(hand, 1.1) for _ in range(2 * ENOUGH)][-1]
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


@pytest.mark.parametrize(("change", "times", "refused"), [(5.5, 1, 1), (1.1, 5, 0)])
def test_the_protocol_knows_of_how_many_steps_it_is(change: float, times: int, refused: int) -> None:
    """The same size in all: of as many steps as usual, or of five times as many."""
    hand = Hand(guard_z=8.0)
    hand.join("a")
    hand.join("b")
    for _ in range(2 * ENOUGH):
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
    for _ in range(2 * ENOUGH):
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
    for _ in range(2 * ENOUGH):
        usual_move = one_round(hand, 1.1)
    if compacted:
        hand.state, hand.journal = through_json(whole_state(hand.protocol)), []
    before = [guard.state() for guard in hand.protocol.guards]
    hand.restart()
    assert [guard.state() for guard in hand.protocol.guards] == before
    assert one_round(hand, 1e4) == pytest.approx(usual_move, rel=0.2)
    assert hand.refused() == ["outlier"]
