"""The syncer dies and comes back: what was durable is there again, bit for bit, and nothing else is."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.diloco.durable import first_state, whole_state
from app.diloco.events import Join, Lost, Published, RecordFailed, Tick
from app.diloco.shadow import restore
from tests.unit.tiny import RUN, Hand, restored, through_json, tiny_layout, tiny_parameters


def run(hand: Hand, moves: int, start: int = 0) -> Hand:
    """Two learners merge, one dies and joins again; every move is one merge of one fragment."""
    for move in range(start, start + moves):
        if move == 0:
            hand.join("a")
            hand.join("b")
        if move == 3:
            hand.feed(Lost("b", 1, "exit"))
            hand.join("b")
        hand.work(0.1 * (move + 1), "a", "b")
        for name in ("a", "b"):
            hand.adopt(name)
    return hand


def snapshot(hand: Hand) -> None:
    hand.state, hand.journal = through_json(whole_state(hand.protocol)), []


def books_without_reports(hand: Hand) -> dict[str, Any]:
    """The books, once everybody has spoken: the counters of reports that no record followed come from learners."""
    for name in ("a", "b"):
        hand.poll(name)
    state = hand.protocol.books.state()
    for account in state["open"]:
        account.pop("seq")
    return state


def same(one: Hand, other: Hand) -> None:
    for mine, its in zip(one.protocol.fragments, other.protocol.fragments, strict=True):
        assert (mine.version, mine.clock, mine.digest) == (its.version, its.clock, its.digest)
        assert torch.equal(mine.theta, its.theta)
        assert torch.equal(mine.theta_hat, its.theta_hat)
        assert torch.equal(mine.momentum, its.momentum)
        assert torch.equal(mine.average, its.average)
        assert mine.last_merged == its.last_merged
    assert one.protocol.clock.t == other.protocol.clock.t
    assert one.protocol.incarnations == other.protocol.incarnations
    assert one.protocol.merges == other.protocol.merges
    assert books_without_reports(one) == books_without_reports(other)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4", "fp4"])
@pytest.mark.parametrize("compacted_at", [None, 0, 2, 5])
def test_a_restart_brings_back_what_a_run_without_it_has(codec: str, compacted_at: int | None) -> None:
    dials = {"codec_down": codec, "outer_lr": 0.7, "outer_momentum": 0.6, "average": 0.7}
    plain = run(Hand(**dials), 6)
    hand = Hand(**dials)
    if compacted_at is not None:
        run(hand, compacted_at)
        snapshot(hand)
        run(hand, 6 - compacted_at, compacted_at)
    else:
        run(hand, 6)
    assert hand.protocol.merges >= 6
    assert not any(torch.equal(fragment.average, fragment.theta) for fragment in hand.protocol.fragments)
    hand.restart()
    same(hand, plain)


@pytest.mark.parametrize("restart_at", [1, 3, 5])
def test_a_run_with_a_restart_goes_on_like_one_without(restart_at: int) -> None:
    plain = run(Hand(outer_momentum=0.6, outer_lr=0.7), 8)
    hand = run(Hand(outer_momentum=0.6, outer_lr=0.7), restart_at)
    hand.restart()
    run(hand, 8 - restart_at, restart_at)
    for mine, its in zip(hand.protocol.fragments, plain.protocol.fragments, strict=True):
        assert mine.version == its.version
        assert torch.equal(mine.theta, its.theta)
        assert torch.equal(mine.momentum, its.momentum)
        assert torch.equal(mine.average, its.average)
    assert hand.protocol.books.balance() == plain.protocol.books.balance()


def test_learners_of_before_are_known_and_older_epochs_are_refused() -> None:
    hand = run(Hand(), 2)
    hand.step("a", 2)
    hand.poll("a")
    given = hand.capture("a", 1)
    hand.restart()
    hand.feed(Tick())
    assert {m.learner: (m.incarnation, m.pool) for m in hand.protocol.members.values()} == {
        "a": (1, "pool"),
        "b": (1, "pool"),
    }
    hand.arrive(given)
    assert hand.refused() == ["epoch"]
    reply = hand.poll("a")
    assert reply.epoch == 2
    assert not reply.fenced


def test_a_learner_that_died_meanwhile_can_be_declared_lost() -> None:
    hand = run(Hand(), 2)
    hand.restart()
    hand.feed(Lost("b", 1, "exit"))
    assert list(hand.protocol.members) == ["a"]
    assert hand.poll("b").fenced


def test_a_learner_that_did_not_hear_of_its_merge_hears_of_it_from_the_next_syncer() -> None:
    for compacted in (False, True):
        hand = Hand(adopt="rebase")
        hand.join("a")
        hand.step("a", 2)
        hand.poll("a")
        hand.answer("a", 1)
        hand.publish()
        if compacted:
            snapshot(hand)
        hand.restart()
        hand.step("a", 1)
        hand.adopt("a")
        held = hand.replicas["a"].fragments[1]
        assert (held.version, held.outstanding, held.discarded) == (1, 10, {})
        assert hand.protocol.books.account("a", 1).outstanding(1) == 10  # type: ignore[union-attr]


def test_a_join_that_failed_takes_nothing_from_the_living_incarnation() -> None:
    hand = Hand()
    hand.join("a")
    hand.feed(Join(hand.hello("a", "other")))
    hand.feed(RecordFailed("other"))
    snapshot(hand)
    hand.step("a", 2)
    hand.poll("a")
    hand.answer("a", 1)
    hand.publish()
    hand.restart()
    hand.adopt("a")
    assert hand.replicas["a"].fragments[1].discarded == {}
    assert hand.join("a").sender.incarnation == 3  # 2 was issued and is never used again


def test_the_same_hello_gives_the_same_incarnation_after_a_restart() -> None:
    hand = Hand()
    hand.join("a", "t")
    hand.restart()
    hand.feed(Join(hand.hello("a", "t")))
    assert hand.protocol.incarnations == {"a": 1}


def test_a_merge_that_was_not_durable_never_was() -> None:
    hand = run(Hand(), 2)
    before = [f.version for f in hand.protocol.fragments]
    hand.step("a", 2)
    hand.poll("a")
    for p in sorted(hand.protocol.rounds):
        for name in ("a", "b"):
            hand.answer(name, p)
    result = hand.jobs[0].run()
    hand.restart()
    hand.feed(Published(result))  # nobody asked for it in this epoch
    assert [f.version for f in hand.protocol.fragments] == before


def test_a_snapshot_shares_nothing_with_the_living_machine() -> None:
    hand = run(Hand(), 2)
    state = whole_state(hand.protocol)
    copy = through_json(state)
    run(hand, 3, 2)
    assert through_json(state).meta == copy.meta
    for name, tensor in copy.tensors.items():
        assert torch.equal(state.tensors[name], tensor)


def test_the_first_state_is_the_model_s_parameters() -> None:
    layout = tiny_layout(3)
    state = first_state(RUN, layout, tiny_parameters(4))
    protocol = restored(replace(Hand().settings, fragments=3), through_json(state), [], 1, 10)
    assert [f.version for f in protocol.fragments] == [0, 0, 0]
    assert sum(float(f.theta.sum()) for f in protocol.fragments) == pytest.approx(
        sum(float(t.sum()) for t in tiny_parameters(4).values()), abs=1e-5
    )
    assert all(not f.momentum.any() for f in protocol.fragments)


def test_another_run_s_or_model_s_state_is_refused() -> None:
    hand = Hand()
    for run_id, layout in (("other", tiny_layout(2)), (RUN, tiny_layout(3))):
        with pytest.raises(ValueError, match="checkpoint is of run"):
            restore(run_id, 2, layout, hand.settings, 10, hand.state, [])


def test_a_gap_in_the_journal_is_refused() -> None:
    hand = run(Hand(), 4)
    gap = [r for r in hand.journal if r.meta["kind"] != "merge" or r.meta["version"] != 1]
    with pytest.raises(ValueError, match="version 2 follows 0"):
        restored(hand.settings, hand.state, gap, 2, 10)
