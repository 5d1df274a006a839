"""The books: every token of every fragment has one fate."""

import json
from dataclasses import replace

import pytest

from app.diloco.accounts import Balance, Books
from app.diloco.messages import Consumed, Contained, Report, Sender

NUMELS = [3, 5]


def report(tokens: int, *, learner: str = "a", seq: int = 0, missed: tuple[int, int] = (0, 0)) -> Report:
    return Report(
        sender=Sender("run", 1, learner, 1),
        seq=seq,
        heard=0,
        clock=0,
        steps=tokens // 10,
        tokens=tokens,
        step_time=1.0,
        loss=0.0,
        held=(0, 0),
        discarded=tuple({"missed": m} if m else {} for m in missed),
        outstanding=(0, 0),
    )


def contained(tokens: int, learner: str = "a") -> Contained:
    return Contained(learner, 1, 1, 1, 0, 1, tokens // 10, tokens, 1.0)


def books_of(*learners: str) -> Books:
    books = Books(NUMELS)
    for learner in learners:
        books.open(learner, 1, "pool", f"token-{learner}")
    return books


def test_units_are_tokens_times_parameters() -> None:
    books = books_of("a")
    books.report(report(100, missed=(20, 0)))
    books.merged(1, contained(60))
    assert books.balance() == Balance(8, 800, 300, {"missed": 60}, 800 - 300 - 60)
    assert books.balance().exact


def test_a_report_counts_once_and_an_older_one_not_at_all() -> None:
    books = books_of("a")
    assert books.report(report(100, seq=2))
    assert not books.report(report(100, seq=2))
    assert not books.report(report(50, seq=1))
    assert not books.report(report(50, learner="nobody", seq=9))
    assert books.tokens == 100


@pytest.mark.parametrize(
    ("garbage", "fits"),
    [
        ({}, True),
        ({"tokens": 99}, False),
        ({"steps": 9}, False),
        ({"discarded": ({"missed": -1}, {})}, False),
        ({"discarded": ({"missed": 30}, {})}, True),
        ({"discarded": ({"missed": 31}, {})}, False),
        ({"discarded": ({"missed": 20, "overwritten": 11}, {})}, False),
    ],
)
def test_counters_must_be_possible(garbage: dict[str, object], fits: bool) -> None:
    books = books_of("a")
    books.report(report(100))
    books.merged(0, contained(40))
    books.claim(0, "a", 1, 30)
    account = books.account("a", 1)
    assert account is not None
    assert account.fits(replace(report(100, seq=1), **garbage)) is fits  # type: ignore[arg-type]


def test_death_discards_what_is_outstanding() -> None:
    books = books_of("a", "b")
    books.report(report(100, missed=(20, 0)))
    books.merged(1, contained(60))
    books.close("a", 1, "died")
    books.close("a", 1, "died")
    balance = books.balance()
    assert balance.discarded == {"missed": 60, "died": 80 * 3 + 40 * 5}
    assert (balance.outstanding, balance.exact, books.tokens) == (0, True, 100)
    assert books.learner_totals("a") == (10, 100)
    assert [account.learner for account in books.living] == ["b"]


def test_work_in_a_merge_under_way_waits_for_it() -> None:
    books = books_of("a")
    books.report(report(100))
    books.claim(0, "a", 1, 70)
    books.close("a", 1, "died")
    assert books.balance() == Balance(8, 800, 0, {"died": 30 * 3 + 100 * 5}, 70 * 3)
    assert books.learner_totals("a") == (10, 100)
    books.merged(0, contained(70))
    assert books.balance() == Balance(8, 800, 210, {"died": 590}, 0)
    assert books.learner_totals("a") == (10, 100)


def test_work_in_a_merge_that_comes_to_nothing_has_died() -> None:
    books = books_of("a")
    books.report(report(100))
    books.claim(0, "a", 1, 70)
    books.close("a", 1, "died")
    books.release(0, "a", 1)
    assert books.balance() == Balance(8, 800, 0, {"died": 800}, 0)


def test_a_new_incarnation_ends_the_older_one() -> None:
    books = books_of("a")
    books.report(report(100))
    books.open("a", 2, "pool", "new")
    assert books.account("a", 1) is None
    assert books.balance().discarded == {"died": 800}
    assert books.learner_totals("a") == (10, 100)


def test_at_the_end_nothing_is_outstanding() -> None:
    books = books_of("a", "b")
    books.report(report(100))
    books.report(report(40, learner="b"))
    books.close_all("unfinished")
    assert books.balance() == Balance(8, 1120, 0, {"unfinished": 1120}, 0)


def test_books_come_back_from_their_journaled_state() -> None:
    books = books_of("a", "b")
    books.report(report(100, missed=(20, 0)))
    books.report(report(50, learner="b"))
    books.merged(1, contained(60))
    books.open("b", 2, "pool", "new")
    state = json.loads(json.dumps(books.state()))
    back = Books.from_state(NUMELS, state)
    assert back.state() == books.state()
    assert back.balance() == books.balance()
    back.merged(0, contained(10))
    assert json.loads(json.dumps(books.state())) == state  # nothing is shared


def test_of_a_dead_incarnation_only_durable_merges_count_after_a_restart() -> None:
    books = books_of("a")
    books.report(report(100))
    books.claim(0, "a", 1, 70)
    books.claim(1, "a", 1, 70)
    books.close("a", 1, "died")
    back = Books.from_state(NUMELS, json.loads(json.dumps(books.state())), [(0, contained(70))])
    assert back.balance() == Balance(8, 800, 210, {"died": 30 * 3 + 100 * 5}, 0)


def test_an_unknown_account_can_not_be_credited() -> None:
    with pytest.raises(KeyError, match="nobody#1"):
        books_of("a").merged(0, contained(1, "nobody"))


def test_a_balance_that_does_not_add_up_is_not_exact() -> None:
    assert Balance(1, 10, 5, {"died": 2}, 3).exact
    assert not Balance(1, 10, 5, {"died": 2}, 4).exact
    assert not Balance(1, 10, 9, {"died": 2}, -1).exact


def test_samples_are_used_once_a_version_holds_work_on_them() -> None:
    books = books_of("a")
    books.report(replace(report(100), samples=10))
    assert books.consumed() == (Consumed("a", 1, 0, 10, ended=False),)
    assert books.consumed([replace(contained(60), samples=6)]) == (Consumed("a", 1, 6, 10, ended=False),)
    books.merged(0, replace(contained(60), samples=6))
    books.merged(1, replace(contained(50), samples=5))  # a fragment behind the others changes nothing
    assert books.consumed() == (Consumed("a", 1, 6, 10, ended=False),)
    books.close("a", 1, "died")
    assert books.consumed() == (Consumed("a", 1, 6, 10, ended=True),)


def test_who_died_while_a_merge_holds_its_work_has_not_ended() -> None:
    """That merge decides which of its samples others get."""
    books = books_of("a")
    books.report(replace(report(100), samples=10))
    books.claim(1, "a", 1, 60)
    books.close("a", 1, "died")
    assert books.consumed() == (Consumed("a", 1, 0, 10, ended=False),)
    books.merged(1, replace(contained(60), samples=6))
    assert books.consumed() == (Consumed("a", 1, 6, 10, ended=True),)


def test_ended_samples_are_told_until_they_are_known() -> None:
    books = books_of("a", "b")
    books.close("a", 1, "died")
    state = json.loads(json.dumps(books.state()))
    ended = [entry for entry in Books.from_state(NUMELS, state).consumed() if entry.ended]
    assert ended == [Consumed("a", 1, 0, 0, ended=True)]
    books.told(ended)
    books.told(ended)
    assert books.consumed() == (Consumed("b", 1, 0, 0, ended=False),)
