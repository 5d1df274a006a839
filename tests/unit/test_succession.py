"""When the syncer that follows takes over: at once from a dead one, after a while from a silent one, never by its own
sleep."""

from app.run.succession import Seat, Succession

AFTER_S = 4.0
STEP_S = 0.5


def due_at(seats: dict[float, Seat], written: set[float] = frozenset(), step_s: float = STEP_S) -> float | None:
    """When the follower takes over, looking all the time; `seats` says from when on the other one looks how."""
    succession, now = Succession(AFTER_S, 0.0), 0.0
    while now < 30.0:
        now += step_s
        seat = next(seat for since, seat in sorted(seats.items(), reverse=True) if now >= since)
        if succession.due(seat, now in written, now):
            return now
    return None


def test_while_the_other_leads_it_follows() -> None:
    assert due_at({0: Seat.LEADS}) is None


def test_from_one_that_led_and_is_gone_it_takes_over_at_once() -> None:
    assert due_at({0: Seat.LEADS, 10: Seat.GONE}) == 10


def test_where_there_is_nobody_else_it_leads_at_once() -> None:
    assert due_at({0: Seat.NOBODY}) == STEP_S


def test_from_a_silent_one_it_takes_over_after_a_while() -> None:
    assert due_at({0: Seat.LEADS, 10: Seat.SILENT}) == 10 + AFTER_S


def test_a_short_silence_is_forgotten() -> None:
    assert due_at({0: Seat.LEADS, 10: Seat.SILENT, 13: Seat.LEADS, 20: Seat.SILENT}) == 20 + AFTER_S


def test_who_writes_is_there_whatever_the_network_says() -> None:
    assert due_at({0: Seat.LEADS, 10: Seat.SILENT}, written={12.0, 15.0}) == 15 + STEP_S + AFTER_S
    assert due_at({0: Seat.LEADS, 10: Seat.GONE}, written={10.0}) == 10 + STEP_S


def test_of_two_that_follow_one_leads_after_a_while() -> None:
    assert due_at({0: Seat.FOLLOWS}) == STEP_S + AFTER_S


def test_one_that_followed_and_is_gone_is_no_reason_to_hurry() -> None:
    """A cold process after its predecessor's death leaves the other one, which is warm, the time to take over."""
    assert due_at({0: Seat.FOLLOWS, 2: Seat.GONE}) == STEP_S + AFTER_S
    assert due_at({0: Seat.FOLLOWS, 2: Seat.GONE, 3: Seat.LEADS}) is None


def test_its_own_standstill_is_no_silence_of_the_other() -> None:
    succession = Succession(AFTER_S, 0.0)
    assert not succession.due(Seat.LEADS, False, 1.0)
    assert not succession.due(Seat.SILENT, False, 61.0)  # it was frozen: the answer may just not be here yet
    assert not succession.due(Seat.LEADS, False, 61.5)
    assert due_at({0: Seat.LEADS, 10: Seat.SILENT}, step_s=3.0) is not None  # slow looks don't hold it off for ever
