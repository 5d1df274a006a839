"""What an incarnation can have done by now, and that an honest one never claims more."""

import random
from dataclasses import replace
from typing import Any

import pytest

from app.diloco.events import Reported
from app.diloco.messages import Report, Sender
from app.diloco.pace import FREE_STEPS, LEAST_STEP_S, MOST_STEP_S, SPEED_UP, Pace
from tests.unit.tiny import RUN, Hand


def report(steps: int, clock: int, step_time: float, **others: Any) -> Report:
    told = Report(Sender(RUN, 1, "a", 1), steps, 0, clock, steps, 0, step_time, 0.5, (0, 0), ({}, {}), (0, 0))
    return replace(told, **others)


def test_no_more_steps_than_fit_into_the_time() -> None:
    pace = Pace.joined(100.0, clock=7)
    most = FREE_STEPS + round(60.0 * SPEED_UP / 0.5)
    assert pace.allows(report(most, 7 + most, 0.5), 7, 160.0)
    assert not pace.allows(report(most + 1, 7, 0.5), 7, 160.0)
    assert not pace.allows(report(0, 8 + most, 0.5), 7, 160.0)


def test_a_step_has_a_least_and_a_longest_time() -> None:
    pace = Pace.joined(0.0, 0)
    most = FREE_STEPS + round(1 / LEAST_STEP_S)
    for step_time in (0.0, 1e-300, LEAST_STEP_S):
        assert pace.allows(report(most, most, step_time), 0, 1.0)
        assert not pace.allows(report(most + 1, 0, step_time), 0, 1.0)
    assert pace.allows(report(1, 1, MOST_STEP_S), 0, 1.0)
    assert not pace.allows(report(1, 1, 2 * MOST_STEP_S), 0, 1.0)


def test_the_clock_that_it_pushed_lifts_it_no_further() -> None:
    """Else each report could be ahead of what the one before had made of the global clock."""
    pace, t = Pace.joined(0.0, 0), 0
    for _ in range(1000):
        told = report(0, t + 8, 1.0)
        if not pace.allows(told, t, 1.0):
            break
        pace.hear(told, t)
        t = told.clock
    assert t <= FREE_STEPS + SPEED_UP


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_learner_is_believed_whatever_happens_to_it(seed: int) -> None:
    """It is sped up and slowed down tenfold, frozen, cut off for long, its messages late; the syncer restarts."""
    chance = random.Random(seed)
    now, t, clock, steps = 50.0, 0, 0, 0
    pace, recent, late = Pace.joined(now, clock), [], []
    for _ in range(2000):
        happens = chance.random()
        if happens < 0.02:
            now += chance.choice([20.0, 3600.0])  # frozen
        if happens > 0.98:  # cut off: it steps on and nothing arrives
            step_s = chance.choice([0.01, 0.05, 0.1])
            count = chance.randint(1, 20_000)
            now, steps, clock = now + count * step_s, steps + count, clock + count
            recent = [step_s] * 16
        step_s = chance.choice([0.01, 0.05, 0.1])
        now, steps, clock = now + step_s, steps + 1, clock + 1
        recent = [*recent, step_s][-16:]
        if chance.random() < 0.3:
            clock = max(clock, t)  # adopts
        late.append(report(steps, clock, sorted(recent)[len(recent) // 2]))
        if chance.random() < 0.2:  # what was on the way arrives
            for told in late:
                assert pace.allows(told, t, now)
                pace.hear(told, t)
                t = max(t, told.clock)
            late = []
        if chance.random() < 0.01:
            late = []  # what is on its way to a dead syncer is lost
            pace = Pace.remembered(now + 2.0, max(0, steps - chance.randint(0, 10_000)), t)
            now += 2.0


def test_nobody_has_more_tokens_than_its_steps_can_hold() -> None:
    hand = Hand(most_step_tokens=10)
    hand.join("a")
    hand.step("a", 2, tokens=10)
    honest = hand.replicas["a"].report(1.0, 0.5, False)
    hand.feed(Reported(replace(honest, tokens=21)))
    assert hand.refused() == ["corrupt"]
    assert hand.protocol.books.tokens == 0
    hand.feed(Reported(honest))
    assert hand.protocol.books.tokens == 20


def test_one_liar_neither_ends_the_run_nor_moves_its_clock_far() -> None:
    hand = Hand(budget=10_000, most_step_tokens=10)
    for name in ("a", "b"):
        hand.join(name)
        hand.step(name, 2)
        hand.poll(name)
    hand.protocol.members["b"].pace.began_at = hand.now
    for lie in ({"tokens": 10_000}, {"tokens": 10_000, "steps": 1000}, {"clock": 10**9}, {"steps": 10**6}):
        hand.feed(Reported(replace(hand.replicas["b"].report(1.0, 0.5, False), **lie)))
    assert hand.refused() == ["corrupt"] * 4
    assert hand.protocol.finishing is None
    assert hand.protocol.clock.t == 4  # b joined at 2


def test_a_learner_that_stepped_alone_for_long_is_believed_after_a_restart() -> None:
    hand = Hand(most_step_tokens=10)
    hand.join("a")
    hand.step("a", 2)
    hand.poll("a")
    hand.answer("a", 1)
    hand.publish()
    hand.step("a", 50_000)
    hand.restart()
    hand.poll("a")
    assert hand.refused() == []
    assert hand.protocol.books.tokens == 500_020
    lie = replace(hand.replicas["a"].report(1.0, 0.5, False), steps=60_000)
    hand.feed(Reported(lie))
    assert hand.refused() == ["corrupt"]
