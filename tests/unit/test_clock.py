import random

import pytest

from app.diloco.clock import (
    Estimate,
    GlobalClock,
    due_slots,
    fleet_stretch,
    grace_window,
    hang_deadline,
    kth_largest,
)


def test_kth_largest() -> None:
    assert [kth_largest([5, 9, 9, 2], k) for k in (1, 2, 3, 4)] == [9, 9, 5, 2]


@pytest.mark.parametrize("k", [0, 4, -1])
def test_kth_largest_of_too_few(k: int) -> None:
    with pytest.raises(ValueError, match="3 clocks"):
        kth_largest([1, 2, 3], k)


def test_clock_follows_the_kth_fastest() -> None:
    clock = GlobalClock()
    assert clock.advance([10, 3, 7], 2) == 7
    assert clock.advance([12, 3, 9], 2) == 9


def test_clock_never_falls() -> None:
    clock = GlobalClock(5)
    assert clock.advance([4, 4], 1) == 5
    assert clock.advance([50, 4], 1) == 50
    assert clock.advance([4], 1) == 50  # the fastest died
    assert clock.advance([51], 1) == 51


def test_clock_stays_without_a_quorum() -> None:
    clock = GlobalClock(5)
    assert clock.advance([90, 80], 3) == 5
    assert clock.advance([], 1) == 5
    assert clock.t == 5


def test_each_fragment_is_due_once_in_an_interval() -> None:
    fired = {t: due_slots(t - 1, t, 4, 8)[0] for t in range(1, 17)}
    want = {2: [1], 4: [2], 6: [3], 8: [0], 10: [1], 12: [2], 14: [3], 16: [0]}
    assert fired == {t: want.get(t, []) for t in range(1, 17)}


def test_a_range_gives_its_slots_in_order() -> None:
    assert due_slots(0, 8, 4, 8) == ([1, 2, 3, 0], 0)
    assert due_slots(5, 11, 4, 8) == ([3, 0, 1], 0)
    assert due_slots(8, 8, 4, 8) == ([], 0)


def test_a_jump_makes_each_due_once() -> None:
    assert due_slots(5, 5 + 3 * 8, 4, 8) == ([3, 0, 1, 2], 8)
    assert due_slots(5, 5 + 10, 4, 8) == ([3, 0, 1, 2], 1)


def test_more_fragments_than_steps() -> None:
    assert due_slots(0, 2, 4, 2) == ([2, 3, 0, 1], 0)


def test_a_falling_clock_is_refused() -> None:
    with pytest.raises(ValueError, match="from 5 to 4"):
        due_slots(5, 4, 4, 8)


def test_due_slots_equal_a_step_by_step_count() -> None:
    chance = random.Random(0)
    for _ in range(200):
        P, H, start = chance.randint(1, 9), chance.randint(1, 30), chance.randint(0, 90)
        stop = start + chance.randint(0, 70)
        slots = [p for s in range(start + 1, stop + 1) for p in range(P) if s % H == int(p * H / P + 1e-9)]
        once = list(dict.fromkeys(slots))
        assert due_slots(start, stop, P, H) == (once, len(slots) - len(once))


def test_grace_window_by_hand() -> None:
    # τ = 2 steps of 0.5 s; 0.2 s to the quorum, 0.1 s to merge and return: 0.7 s are left, γ = 0.8 of them.
    assert grace_window(2, 0.5, 0.2, 0.1, 0.8) == pytest.approx(0.56)
    assert grace_window(2, 0.5, 0.2, 0.1, 0.0) == 0.0


def test_grace_window_is_never_negative() -> None:
    assert grace_window(2, 0.1, 0.3, 0.1, 0.8) == 0.0
    assert grace_window(0, 0.5, 0.0, 0.0, 1.0) == 0.0


def test_estimate_is_a_running_median() -> None:
    estimate = Estimate(window=3, initial=0.25)
    assert estimate.value == 0.25
    seen = []
    for seconds in (1.0, 100.0, 2.0, 3.0, 4.0):
        estimate.add(seconds)
        seen.append(estimate.value)
    assert seen == [1.0, 50.5, 2.0, 3.0, 3.0]


def test_hang_deadline() -> None:
    assert hang_deadline(0.01, 15.0, 20.0, 1.0) == 15.0
    assert hang_deadline(2.0, 15.0, 20.0, 1.0) == 40.0
    assert hang_deadline(2.0, 15.0, 20.0, 1.5) == 60.0
    assert hang_deadline(0.01, 15.0, 20.0, 2.0) == 30.0


def test_fleet_stretch_is_the_median_and_at_least_one() -> None:
    assert fleet_stretch([2.0, 6.0, 1.0], [1.0, 2.0, 1.0]) == 2.0
    assert fleet_stretch([0.5, 0.5], [1.0, 1.0]) == 1.0
    assert fleet_stretch([9.0, 1.0, 1.0], [1.0, 1.0, 1.0]) == 1.0  # one slow learner is no slow fleet
    assert fleet_stretch([], []) == 1.0
    assert fleet_stretch([3.0, 5.0], [1.0, 0.0]) == 3.0


def test_fleet_stretch_wants_one_usual_time_for_each() -> None:
    with pytest.raises(ValueError, match="shorter"):
        fleet_stretch([1.0, 2.0], [1.0])
