"""When rounds open and close: the clock, quorum, grace window, deadlines and deaths."""

import pytest

from app.diloco.events import Lost, Reported, Tick
from tests.unit.tiny import Hand

# Two fragments, H = 4: fragment 1 is due at steps 2, 6, ... and fragment 0 at 4, 8, ...


def fleet(*names: str, **dials: object) -> Hand:
    hand = Hand(**dials)
    for name in names:
        hand.join(name)
    return hand


def run_to(hand: Hand, name: str, clock: int) -> None:
    hand.step(name, clock - hand.replicas[name].clock)
    hand.poll(name)


def test_the_clock_is_the_kth_fastest_learner_s() -> None:
    hand = fleet("a", "b", "c", min_quorum=2)
    run_to(hand, "a", 9)
    assert hand.protocol.clock.t == 0
    run_to(hand, "b", 3)
    assert hand.protocol.clock.t == 3
    run_to(hand, "c", 1)
    assert hand.protocol.clock.t == 3


def test_a_slow_learner_never_holds_the_clock_back() -> None:
    hand = fleet("a", "b")
    run_to(hand, "a", 8)
    assert hand.protocol.clock.t == 8


def test_a_jump_makes_each_fragment_due_once() -> None:
    hand = fleet("a")
    run_to(hand, "a", 2 + 10 * 4)
    assert sorted(hand.protocol.rounds) == [0, 1]
    assert hand.protocol.skipped_slots == 10 + 11 - 2


def test_a_fragment_has_one_open_round_and_rounds_overlap() -> None:
    hand = fleet("a")
    run_to(hand, "a", 4)
    first = {p: r.id for p, r in hand.protocol.rounds.items()}
    assert sorted(first) == [0, 1]
    run_to(hand, "a", 8)
    assert {p: r.id for p, r in hand.protocol.rounds.items()} == first
    assert hand.protocol.skipped_slots == 2


def test_a_round_closes_at_once_when_all_have_answered() -> None:
    hand = fleet("a", "b")
    for name in ("a", "b"):
        run_to(hand, name, 2)
    hand.answer("a", 1)
    assert not hand.jobs
    hand.answer("b", 1)
    assert len(hand.jobs) == 1
    assert hand.jobs[0].version == 1


def test_silence_holds_a_round_no_longer_than_quorum_and_grace() -> None:
    hand = fleet("a", "b", overlap_steps=4, grace_safety=0.5)
    for name in ("a", "b"):
        run_to(hand, name, 2)
    hand.now += 1
    hand.answer("a", 1)
    want = hand.now + 0.5 * (4 * 1.0 - 1.0)  # γ · (τ · step time − time to quorum)
    assert hand.protocol.next_wake == want
    hand.now = want - 0.01
    hand.feed(Tick())
    assert not hand.jobs
    hand.now = want
    hand.feed(Tick())
    assert len(hand.jobs) == 1
    hand.publish()
    merge = hand.notes("merge")[0]
    assert merge["missing"] == ["b"]
    assert (merge["wait_quorum_s"], merge["wait_grace_s"]) == (1.0, pytest.approx(1.5))


def test_without_a_safety_share_a_round_closes_at_its_quorum() -> None:
    hand = fleet("a", "b", grace_safety=0.0)
    for name in ("a", "b"):
        run_to(hand, name, 2)
    hand.answer("a", 1)
    assert len(hand.jobs) == 1


def test_the_time_to_merge_and_return_shortens_the_window() -> None:
    hand = fleet("a", "b", overlap_steps=4, grace_safety=1.0)
    for name in ("a", "b"):
        run_to(hand, name, 2)
    for name in ("a", "b"):
        hand.answer(name, 1)
    hand.now += 3.0  # computing, journal, way back
    hand.publish()
    hand.adopt("a")
    assert hand.protocol.merge_return.value == 3.0
    for name in ("a", "b"):
        run_to(hand, name, 4)
    hand.answer("a", 0)
    assert hand.protocol.next_wake == hand.now + 1.0


def test_learners_that_are_silent_do_not_set_the_pace_of_the_window() -> None:
    hand = fleet("a", "b", "gone", "lost", overlap_steps=4, grace_safety=1.0)
    for name in ("gone", "lost"):
        hand.step(name, 6)
        hand.feed(Reported(hand.replicas[name].report(9.0, 0.5, False)))
    hand.now += 1000.0
    for name in ("a", "b"):
        run_to(hand, name, 1)
    hand.feed(Tick())  # what the silent ones made due is given up
    for name in ("a", "b"):
        run_to(hand, name, 10)
    assert hand.protocol.rounds[1].asked == ("a", "b")
    for name in ("gone", "lost"):
        hand.protocol.members[name].clock = 10
    hand.answer("a", 1)
    assert hand.protocol.rounds[1].close_at == hand.now + 4.0


def test_a_round_waits_for_k_answers() -> None:
    hand = fleet("a", "b", "c", min_quorum=2, grace_safety=0.0)
    for name in ("a", "b", "c"):
        run_to(hand, name, 2)
    hand.answer("a", 1)
    hand.now += 5
    hand.feed(Tick())
    assert not hand.jobs
    hand.answer("c", 1)
    assert [a.contribution.sender.learner for a in hand.jobs[0].answers] == ["a", "c"]


def test_a_round_without_a_quorum_is_given_up_at_its_deadline_and_its_work_stays() -> None:
    hand = fleet("a", "b", "c", min_quorum=2)
    for name in ("a", "b", "c"):
        run_to(hand, name, 2)
    given = hand.answer("a", 1)
    assert hand.protocol.next_wake == hand.now + hand.settings.round_deadline_s
    hand.now += hand.settings.round_deadline_s
    hand.feed(Tick())
    assert hand.protocol.rounds == {}
    assert not hand.jobs
    assert hand.notes("round_given_up")[0]["answers"] == ["a"]
    account = hand.protocol.books.account("a", 1)
    assert account is not None
    assert (account.outstanding(1), account.claimed[1]) == (given.c_tokens, 0)


def test_work_of_a_round_that_was_given_up_is_merged_by_the_next() -> None:
    hand = fleet("a")
    run_to(hand, "a", 2)
    hand.now += hand.settings.round_deadline_s
    hand.feed(Tick())
    run_to(hand, "a", 6)
    assert hand.answer("a", 1).c_tokens == 60
    hand.publish()
    hand.adopt("a")
    assert hand.replicas["a"].fragments[1].outstanding == 0
    assert hand.protocol.books.balance().discarded == {}


def test_answers_without_work_do_not_count() -> None:
    hand = fleet("a", "b", min_quorum=1, grace_safety=0.0)
    run_to(hand, "a", 2)
    hand.answer("b", 1)  # it has not stepped yet
    assert not hand.jobs
    hand.answer("a", 1)
    assert [a.contribution.sender.learner for a in hand.jobs[0].answers] == ["a"]


def test_a_learner_that_dies_is_left_out_of_its_round() -> None:
    hand = fleet("a", "b", "c", min_quorum=2, grace_safety=1.0, overlap_steps=10)
    for name in ("a", "b", "c"):
        run_to(hand, name, 2)
    hand.answer("a", 1)
    hand.answer("b", 1)
    assert hand.protocol.next_wake < hand.now + 20
    hand.feed(Lost("a", 1, "exit"))
    # One answer is under the quorum again: it waits for c, and nobody is woken for a window that is void.
    assert hand.protocol.next_wake == hand.now + hand.settings.round_deadline_s
    assert hand.protocol.books.balance().discarded == {"died": 20 * hand.protocol.layout.numel}
    hand.answer("c", 1)
    assert [a.contribution.sender.learner for a in hand.jobs[0].answers] == ["b", "c"]


def test_a_round_that_can_not_reach_its_quorum_is_given_up() -> None:
    hand = fleet("a", "b", "c", min_quorum=3)
    for name in ("a", "b", "c"):
        run_to(hand, name, 2)
    hand.answer("a", 1)
    hand.feed(Lost("b", 1, "exit"))
    assert hand.protocol.rounds == {}


def test_a_death_after_the_merge_is_decided_keeps_the_work() -> None:
    hand = fleet("a", "b")
    for name in ("a", "b"):
        run_to(hand, name, 2)
        hand.answer(name, 1)
    hand.feed(Lost("a", 1, "exit"))
    hand.publish()
    balance = hand.protocol.books.balance()
    assert balance.merged == 40 * hand.protocol.layout.fragments[1].numel
    assert balance.discarded == {"died": 20 * hand.protocol.layout.fragments[0].numel}
    assert hand.protocol.books.learner_totals("a") == (2, 20)


def test_a_learner_that_joins_in_a_round_is_not_asked() -> None:
    hand = fleet("a")
    run_to(hand, "a", 2)
    hand.join("b")
    assert hand.ask("b") == ()
    hand.feed(Lost("a", 1, "exit"))
    hand.join("a")
    assert hand.ask("a") == ()


def test_fewer_than_k_live_learners_pause_merges_until_there_are_enough() -> None:
    hand = fleet("a", "b", min_quorum=2)
    assert not hand.protocol.paused
    hand.feed(Lost("b", 1, "exit"))
    assert hand.protocol.paused
    run_to(hand, "a", 6)
    assert hand.protocol.rounds == {}
    hand.join("b")
    assert not hand.protocol.paused
    assert [n["live"] for n in hand.notes("paused")] == [0, 1]
    for name in ("a", "b"):
        run_to(hand, name, 10)
    assert sorted(hand.protocol.rounds) == [0, 1]


def test_a_learner_that_hangs_is_not_asked() -> None:
    hand = fleet("a", "b")
    for name in ("a", "b"):
        run_to(hand, name, 1)
    hand.now += hand.settings.hang_steps * 1.0 + 1.0
    run_to(hand, "a", 2)
    assert hand.protocol.rounds[1].asked == ("a",)


def test_losing_the_fastest_learner_does_not_stop_the_merges() -> None:
    hand = fleet("a", "b")
    for name in ("a", "b"):
        run_to(hand, name, 1)
    run_to(hand, "a", 102)
    assert hand.protocol.clock.t == 102
    while hand.protocol.rounds:
        for ask in hand.ask("a"):
            hand.arrive(hand.replicas["a"].contribute(ask, 1.0, 0.5, False))
        hand.now += hand.settings.round_deadline_s
        hand.poll("b")
        hand.feed(Tick())
        hand.publish()
    hand.feed(Lost("a", 1, "exit"))
    hand.adopt("b")
    assert hand.replicas["b"].clock == 102  # lifted by what it adopted
    run_to(hand, "b", 106)
    assert hand.protocol.rounds
    assert all(round_.asked == ("b",) for round_ in hand.protocol.rounds.values())


def test_asks_are_repeated_until_they_were_heard() -> None:
    hand = fleet("a")
    run_to(hand, "a", 2)
    assert len(hand.poll("a").asks) == 1
    assert len(hand.poll("a").asks) == 1  # the reply got lost
    assert len(hand.ask("a")) == 1
    assert hand.poll("a").asks == ()
