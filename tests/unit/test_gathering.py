"""When a data-parallel group forms, and of whom."""

from dataclasses import replace

from app.learning.gathering import Gathering, Guest

PATIENCE_S = 5.0


def guest(name: str, visit: str = "", incarnation: int = 1, steps: int = 0) -> Guest:
    return Guest(name, incarnation, visit or f"{name}-1", host=f"host-of-{name}", port=ord(name), steps=steps)


def gathering(members: str = "abc") -> Gathering:
    return Gathering(tuple(members), PATIENCE_S, tag="t")


def test_it_forms_when_the_last_member_comes() -> None:
    hall = gathering()
    assert hall.arrive(guest("b"), 0.0) is None
    assert hall.arrive(guest("a"), 1.0) is None
    assert hall.arrive(guest("b"), 2.0) is None  # told again while it waits
    last = hall.arrive(guest("c"), 3.0)
    assert last is not None
    places = [last, hall.arrive(guest("a"), 3.5), hall.arrive(guest("b"), 9.0)]  # however late they ask
    assert [place and place.rank for place in places] == [2, 0, 1]
    for place in places:
        assert place is not None
        assert (place.world, place.host, place.port, place.source) == (3, "host-of-a", ord("a"), 0)
        assert place.generation == last.generation


def test_the_member_with_the_most_steps_is_the_source() -> None:
    hall = gathering()
    hall.arrive(guest("a", steps=7), 0.0)
    hall.arrive(guest("b", steps=9), 0.0)
    place = hall.arrive(guest("c", steps=9), 0.0)
    assert place is not None
    assert place.source == 1


def test_after_a_break_all_meet_again_under_a_new_generation() -> None:
    hall = gathering("ab")
    hall.arrive(guest("a"), 0.0)
    first = hall.arrive(guest("b"), 0.0)
    assert hall.arrive(guest("a", "a-2"), 10.0) is None
    second = hall.arrive(guest("b", "b-2", incarnation=2), 11.0)
    assert first is not None
    assert second is not None
    assert second.generation != first.generation
    assert hall.arrive(guest("a"), 12.0) is None  # of the group that broke


def test_one_that_left_is_not_counted() -> None:
    hall = gathering("ab")
    hall.arrive(guest("a"), 0.0)
    assert hall.arrive(guest("b"), PATIENCE_S + 1) is None
    assert hall.arrive(guest("a", "a-2"), PATIENCE_S + 2) is not None


def test_a_process_that_was_replaced_takes_no_place() -> None:
    hall = gathering("ab")
    hall.arrive(guest("a", "new", incarnation=2), 0.0)
    assert hall.arrive(guest("a", "old", incarnation=1), 0.0) is None
    place = hall.arrive(guest("b"), 0.0)
    assert place is not None
    assert hall.arrive(guest("a", "old", incarnation=1), 0.0) is None
    assert hall.arrive(guest("a", "new", incarnation=2), 0.0) is not None


def test_strangers_are_not_let_in() -> None:
    hall = gathering("ab")
    hall.arrive(guest("a"), 0.0)
    assert hall.arrive(guest("x"), 0.0) is None


def test_a_successor_takes_the_place_of_the_one_that_waited() -> None:
    hall = gathering("ab")
    hall.arrive(guest("a", steps=5), 0.0)
    hall.arrive(replace(guest("a", "a-2", incarnation=2), host="elsewhere"), 1.0)
    place = hall.arrive(guest("b"), 2.0)
    assert place is not None
    assert (place.host, place.source) == ("elsewhere", 0)
    assert hall.arrive(guest("a"), 3.0) is None


def elastic(members: str = "abc") -> Gathering:
    return Gathering(tuple(members), PATIENCE_S, tag="t", settle_s=1.0)


def test_an_elastic_group_forms_of_whoever_is_there_once_nobody_comes_any_more() -> None:
    hall = elastic()
    assert hall.arrive(guest("a"), 0.0) is None
    assert hall.arrive(guest("b"), 0.8) is None
    assert hall.arrive(guest("a"), 1.5) is None
    place = hall.arrive(guest("b"), 1.8)
    assert place is not None
    assert (place.world, place.rank) == (2, 1)
    assert hall.arrive(guest("a"), 1.9) is not None


def test_all_make_a_group_at_once() -> None:
    hall = elastic("ab")
    hall.arrive(guest("a"), 0.0)
    assert hall.arrive(guest("b"), 0.0) is not None


def test_who_comes_to_an_elastic_group_waits_until_it_meets_again() -> None:
    hall = elastic()
    hall.arrive(guest("a"), 0.0)
    place = hall.arrive(guest("b"), 0.0) or hall.arrive(guest("b"), 1.0)
    assert place is not None
    hall.arrive(guest("a"), 1.0)
    assert not hall.wanted(place.generation, 5.0)
    assert hall.arrive(guest("c", "c-2", incarnation=2), 5.5) is None
    assert hall.wanted(place.generation, 6.0)
    assert hall.arrive(guest("c", "c-2", incarnation=2), 8.0) is None  # not without them
    assert hall.arrive(guest("a", "a-2", steps=9), 8.1) is None
    together = hall.arrive(guest("b", "b-2", steps=9), 8.2)
    assert together is not None
    assert (together.world, together.source) == (3, 0)


def test_who_comes_to_a_group_that_is_no_more_does_not_wait_for_it() -> None:
    hall = elastic()
    hall.arrive(guest("a"), 0.0)
    assert hall.arrive(guest("a"), 1.0) is not None  # alone
    assert hall.arrive(guest("b"), 2.0) is None
    for at in (3.0, 5.0):
        assert hall.arrive(guest("b"), at) is None
    alone = hall.arrive(guest("b"), 1.0 + PATIENCE_S + 0.5)
    assert alone is not None
    assert alone.world == 1


def test_survivors_of_an_elastic_group_form_again_without_the_one_that_died() -> None:
    hall = elastic()
    for name in "abc":
        hall.arrive(guest(name), 0.0)
    assert hall.arrive(guest("a", "a-2", steps=3), 1.0) is None
    assert hall.arrive(guest("b", "b-2", steps=4), 1.1) is None
    assert hall.arrive(guest("a", "a-2", steps=3), 2.0) is None
    place = hall.arrive(guest("b", "b-2", steps=4), 2.2)
    assert place is not None
    assert (place.world, place.source) == (2, 1)


def test_a_group_of_all_has_nobody_to_wait_for() -> None:
    hall = gathering("ab")
    hall.arrive(guest("a"), 0.0)
    place = hall.arrive(guest("b"), 0.0)
    assert place is not None
    hall.arrive(guest("b", "b-2", incarnation=2), 1.0)
    assert not hall.wanted(place.generation, 1.0)
