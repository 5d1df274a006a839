"""When a blocking learner waits, by cases worked out by hand: P = 2, H = 6, so slots 0, 6, 12 and 3, 9, 15."""

import pytest

from app.diloco.blocking import waits_for
from app.diloco.settings import DilocoSettings


@pytest.mark.parametrize(
    ("tau", "clock", "versions_clock", "joined_at", "fragment"),
    [
        (0, 0, (0, 0), 0, None),  # the welcome is the merge of slot 0
        (0, 2, (0, 0), 0, None),
        (0, 3, (0, 0), 0, 1),  # slot 3 of fragment 1, at once
        (0, 3, (0, 3), 0, None),
        (0, 5, (0, 3), 0, None),
        (0, 6, (0, 3), 0, 0),
        (0, 6, (0, 0), 0, 1),  # both: the older slot first
        (2, 3, (0, 0), 0, None),  # τ steps of grace
        (2, 4, (0, 0), 0, None),
        (2, 5, (0, 0), 0, 1),
        (2, 5, (0, 4), 0, None),  # made a step after its slot: that is the merge of the slot
        (2, 8, (0, 3), 0, 0),
        (2, 11, (6, 3), 0, 1),
        (6, 8, (0, 0), 0, None),  # τ = H: the slot before the last
        (6, 9, (0, 0), 0, 1),
        (0, 9, (0, 0), 9, None),  # joined at 9: nothing that was due up to then is missing
        (0, 12, (0, 0), 9, 0),
        (0, 15, (12, 0), 9, 1),
    ],
)
def test_who_waits(tau: int, clock: int, versions_clock: tuple[int, int], joined_at: int, fragment: int | None) -> None:
    settings = DilocoSettings(fragments=2, sync_interval=6, overlap_steps=tau)
    assert waits_for(clock, versions_clock, settings, joined_at) == fragment
