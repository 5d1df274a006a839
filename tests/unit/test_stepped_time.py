"""Stepped mode with unequal paces, delays, deaths and learners that wait."""

import random
from itertools import islice

import numpy as np
import pytest

from app.diloco.agenda import Kill, Pace, kills_every
from app.diloco.fragments import gather
from app.diloco.stepped import SteppedFleet
from tests.unit.test_stepped import RATE, TOKENS, fleet_at, theta_of
from tests.unit.tiny import tiny_layout, tiny_parameters

MIXED = (1.0, 2.0, 3.0, 4.0)


def mixed(**line: float) -> list[Pace]:
    return [Pace(step_s, **line) for step_s in MIXED]


def until(fleet: SteppedFleet, seconds: float) -> None:
    while fleet.now < seconds:
        fleet.advance()


def contributors(fleet: SteppedFleet) -> float:
    return float(np.mean([len(note.fields["contains"]) for note in fleet.notes if note.kind == "merge"]))


def kinds(fleet: SteppedFleet) -> list[str]:
    return [note.kind for note in fleet.notes]


def assert_all_has_a_fate(fleet: SteppedFleet) -> None:
    balance = fleet.protocol.books.balance()
    assert (balance.exact, balance.outstanding) == (True, 0)
    assert balance.merged > 0


@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
def test_the_clock_is_that_of_the_kth_fastest(quorum: int) -> None:
    fleet = fleet_at(mixed(), {"sync_interval": 1000, "min_quorum": quorum})
    for seconds in range(1, 25):
        until(fleet, seconds)
        assert fleet.protocol.clock.t == seconds // MIXED[quorum - 1]


def test_the_fastest_sets_the_pace_of_merges_and_the_others_join_in() -> None:
    fleet = fleet_at(mixed(), {"adopt": "rebase"})
    until(fleet, 60)
    assert [f.version for f in fleet.protocol.fragments] == [10, 10, 10]
    assert [fleet.replicas[f"l{m}"].steps for m in range(4)] == [60, 30, 20, 15]
    assert contributors(fleet) > 3
    fleet.finish()
    assert_all_has_a_fate(fleet)
    assert fleet.protocol.books.balance().discarded == {}


@pytest.mark.parametrize("on_arrival", [False, True])
def test_the_grace_window_makes_merges_richer_at_no_cost_in_steps(on_arrival: bool) -> None:
    def run(safety: float) -> SteppedFleet:
        line = mixed(delay_s=0.05, jitter_s=0.05)
        fleet = fleet_at(line, {"grace_safety": safety}, adopt_on_arrival=on_arrival, chance=random.Random(3))
        until(fleet, 120)
        return fleet

    without, window = run(0.0), run(0.8)
    assert contributors(window) >= 1.5 * contributors(without)
    assert window.protocol.merges == without.protocol.merges
    assert window.protocol.books.tokens == without.protocol.books.tokens


def test_an_answer_outside_the_window_is_too_late() -> None:
    # A round trip takes the last one 2 s longer; the window is 0.8 · τ steps: 1.6 s, then 3.2 s.
    paces = [Pace(), Pace(), Pace(delay_s=1.0)]
    narrow = fleet_at(paces, {"sync_interval": 12, "overlap_steps": 2})
    until(narrow, 80)
    assert contributors(narrow) == 2.0
    assert "late" in {note.fields["reason"] for note in narrow.notes if note.kind == "refused"}
    wide = fleet_at(paces, {"sync_interval": 12, "overlap_steps": 4})
    until(wide, 80)
    assert contributors(wide) == 3.0


def test_what_was_not_merged_dies_with_its_learner() -> None:
    kill = Kill("l1", at_s=20.5, notice_s=0.5, away_s=10.0)
    fleet = fleet_at([Pace()] * 3, {"adopt": "rebase"}, kills=[kill])
    until(fleet, 20)
    account = fleet.protocol.books.account("l1", 1)
    assert account is not None
    numels = [fragment.numel for fragment in fleet.protocol.layout.fragments]
    unmerged = sum(account.outstanding(p) * numel for p, numel in enumerate(numels))
    assert unmerged > 0
    until(fleet, 21)
    assert fleet.protocol.books.balance().discarded == {"died": unmerged}
    until(fleet, 30)
    assert "l1" not in fleet.replicas
    until(fleet, 31)
    fresh = fleet.replicas["l1"]
    assert (fresh.sender.incarnation, fresh.steps, fresh.clock) == (2, 0, 30)
    until(fleet, 60)
    assert fresh.steps == 29
    assert fleet.protocol.books.account("l1", 2) is not None
    fleet.finish()
    assert_all_has_a_fate(fleet)
    assert fleet.protocol.books.balance().discarded == {"died": unmerged}
    assert kinds(fleet).count("leave") == 1


def test_kills_come_at_their_times_and_repeat_with_the_seed() -> None:
    def some(seed: int) -> list[Kill]:
        return list(islice(kills_every(30.0, ["a", "b", "c"], 1.0, 19.0, random.Random(seed)), 20))

    assert [kill.at_s for kill in some(0)] == [30.0 * n for n in range(1, 21)]
    assert {kill.learner for kill in some(0)} == {"a", "b", "c"}
    assert some(0) == some(0) != some(1)


@pytest.mark.parametrize("adopt", ["overwrite", "mix", "rebase"])
@pytest.mark.parametrize("on_arrival", [False, True])
def test_many_deaths_on_a_slow_network_balance(adopt: str, on_arrival: bool) -> None:
    def run() -> SteppedFleet:
        names = [f"l{m}" for m in range(4)]
        kills = kills_every(7.0, names, 2.0, 5.0, random.Random(5))
        paces = mixed(delay_s=0.7, jitter_s=0.9)
        dials = {"adopt": adopt, "codec_up": "int4", "codec_down": "int4"}
        schedule = {"kills": kills, "merge_s": 0.3, "adopt_on_arrival": on_arrival, "chance": random.Random(1)}
        fleet = fleet_at(paces, dials, **schedule)
        while fleet.now < 100:
            fleet.advance()
            assert fleet.protocol.books.balance().exact
        fleet.finish()
        return fleet

    first, second = run(), run()
    assert_all_has_a_fate(first)
    assert first.protocol.books.balance().discarded["died"] > 0
    assert [f.digest for f in first.protocol.fragments] == [f.digest for f in second.protocol.fragments]


@pytest.mark.parametrize("on_arrival", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_network_slower_than_tau_still_ends(on_arrival: bool, blocking: bool) -> None:
    paces = [Pace(delay_s=5.0)] * 2
    dials = {"overlap_steps": 2, "blocking": blocking, "final_deadline_s": 60.0}
    fleet = fleet_at(paces, dials, adopt_on_arrival=on_arrival)
    until(fleet, 100)
    merges = fleet.protocol.merges
    fleet.finish()
    assert fleet.protocol.merges > merges > 3
    assert_all_has_a_fate(fleet)


def test_a_round_that_nobody_can_fill_ends_at_its_deadline() -> None:
    # It dies after the report of step 2, a slot, before the ask gets there at 3. Nobody tells, so K = 2 wait for it.
    kill = Kill("l1", at_s=2.75, notice_s=1000.0, away_s=1000.0)
    paces = [Pace(delay_s=0.5)] * 2
    fleet = fleet_at(paces, {"min_quorum": 2, "round_deadline_s": 9.0, "hang_min_s": 50.0}, kills=[kill])
    until(fleet, 2.5)
    assert [round_.opened_at for round_ in fleet.protocol.rounds.values()] == [2.5]
    until(fleet, 11.0)
    assert "round_given_up" not in kinds(fleet)
    until(fleet, 11.5)
    assert fleet.now == 11.5
    assert "round_given_up" in kinds(fleet)


# ---- learners that wait


def synchronous(learners: int, rounds: int, H: int, lr: float, momentum: float) -> np.ndarray:
    """DiLoCo as its paper has it (arXiv 2311.08105, algorithm 1), weighted by tokens · tokens / steps, in float64."""
    fragment = tiny_layout(1).fragments[0]

    def flat(seed: int) -> np.ndarray:
        return gather(fragment, tiny_parameters(seed)).numpy().astype(np.float64)

    theta, b = flat(0), np.zeros(fragment.numel)
    w = np.array([TOKENS[m] ** 2 * H for m in range(learners)], dtype=np.float64)
    for _ in range(rounds):
        local = [theta.copy() for _ in range(learners)]
        for m in range(learners):
            for _ in range(H):
                local[m] += RATE * (flat(10 + m) - local[m])
        v = theta - sum(wm * x for wm, x in zip(w / w.sum(), local, strict=True))
        b = momentum * b + v
        theta = theta - lr * (v + momentum * b)
    return theta


@pytest.mark.parametrize("line", [{}, {"delay_s": 0.3, "jitter_s": 2.5}])
def test_learners_that_wait_for_all_are_synchronous_diloco(line: dict[str, float]) -> None:
    dials = {"fragments": 1, "overlap_steps": 0, "min_quorum": 4, "blocking": True, "merge": "mean"}
    dials |= {"adopt": "overwrite", "outer_lr": 0.4, "outer_momentum": 0.6}
    fleet = fleet_at(mixed(**line), dials)
    while fleet.protocol.merges < 5:
        fleet.advance()
    want = synchronous(4, 5, H=6, lr=0.4, momentum=0.6)
    assert np.linalg.norm(theta_of(fleet) - want) <= 1e-5 * np.linalg.norm(want)
    assert all(replica.clock == 30 for replica in fleet.replicas.values())
    # What was merged is all there is: nobody stepped on meanwhile.
    assert fleet.protocol.books.balance().outstanding == 0


def test_a_learner_that_waits_stands_still_tau_steps_past_the_slot() -> None:
    dials = {"fragments": 1, "overlap_steps": 2, "min_quorum": 2, "blocking": True}
    fleet = fleet_at([Pace(1.0), Pace(4.0)], dials)
    until(fleet, 23)
    assert [fleet.replicas[name].clock for name in ("l0", "l1")] == [8, 5]
    until(fleet, 25)  # the slow one made its sixth step at 24: merged, adopted, and on
    assert fleet.replicas["l0"].clock == 9
    until(fleet, 30)
    assert fleet.replicas["l0"].clock == 14


def test_nobody_waits_for_ever() -> None:
    # K = M = 2 and one of them is gone for good: its partner goes on after each deadline.
    kill = Kill("l1", at_s=8.5, notice_s=1.0, away_s=10_000.0)
    dials = {"fragments": 1, "overlap_steps": 2, "min_quorum": 2, "blocking": True, "round_deadline_s": 5.0}
    fleet = fleet_at([Pace(), Pace()], dials, kills=[kill])
    until(fleet, 60)
    # The merge of slot 6 was in time. Step 14 at 14 s, then 5 s for slot 12, and 5 s after every 6 steps more.
    assert fleet.replicas["l0"].clock == 14 + 6 * 4
    assert fleet.protocol.merges == 1
