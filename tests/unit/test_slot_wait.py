"""How long a blocking learner waits."""

from app.diloco.settings import DilocoSettings
from app.diloco.slot_wait import SlotWait

SETTINGS = DilocoSettings(fragments=2, sync_interval=8, overlap_steps=1, blocking=True, round_deadline_s=10.0)
"""Fragment 0 has its slots at 0, 8, 16 and fragment 1 at 4, 12, 20."""


def test_it_waits_until_the_merge_is_adopted() -> None:
    wait = SlotWait(SETTINGS, joined_at=0)
    assert not wait.holds(4, [0, 0], 0.0)  # τ steps may be made meanwhile
    assert wait.holds(5, [0, 0], 1.0)
    assert not wait.holds(5, [0, 4], 2.0)


def test_it_waits_for_each_slot_for_so_long_only() -> None:
    wait = SlotWait(SETTINGS, joined_at=0)
    assert wait.holds(5, [0, 0], 100.0)
    assert wait.holds(5, [0, 0], 109.9)
    assert not wait.holds(5, [0, 0], 110.0)
    for clock in (6, 7, 8):  # given up: the next steps don't wait for it again
        assert not wait.holds(clock, [0, 0], 110.0 + clock)
    assert wait.holds(9, [0, 0], 200.0)  # the slot of the other fragment
    assert not wait.holds(9, [8, 0], 201.0)
    assert wait.holds(13, [8, 0], 202.0)  # the next one of the fragment that was given up
    assert not wait.holds(13, [8, 12], 203.0)


def test_two_missing_merges_are_waited_for_one_after_the_other() -> None:
    wait = SlotWait(SETTINGS, joined_at=0)
    assert wait.holds(9, [0, 0], 0.0)  # fragment 1, slot 4
    assert wait.holds(9, [0, 0], 10.0)  # fragment 0, slot 8
    assert wait.holds(9, [0, 0], 19.0)
    assert not wait.holds(9, [0, 0], 20.0)


def test_a_learner_that_joined_later_waits_for_nothing_before() -> None:
    wait = SlotWait(SETTINGS, joined_at=4)
    assert not wait.holds(5, [0, 0], 0.0)
    assert wait.holds(9, [0, 0], 0.0)
