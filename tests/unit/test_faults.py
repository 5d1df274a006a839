"""When the faults of a schedule strike."""

from app.config import Fault
from app.run.faults import due_faults, struck_faults

FAULTS = [
    Fault("kill", "learner-1", at=0.4),
    Fault("freeze", "learner-2", at=0.1),
    Fault("kill_syncer", at=0.4),
    Fault("kill", "learner-0", at=1.0),
]


def test_nothing_strikes_before_its_moment() -> None:
    assert due_faults(FAULTS, (), 99, 1000) == []
    assert due_faults([], (), 1000, 1000) == []


def test_everything_strikes_once_its_moment_has_come() -> None:
    assert due_faults(FAULTS, (), 100, 1000) == [1]
    assert due_faults(FAULTS, (), 400, 1000) == [0, 1, 2]
    assert due_faults(FAULTS, (), 1000, 1000) == [0, 1, 2, 3]


def test_what_struck_does_not_strike_again() -> None:
    assert due_faults(FAULTS, {0, 1}, 999, 1000) == [2]


def test_a_fault_at_the_start() -> None:
    assert due_faults([Fault("kill", "learner-0", at=0.0)], (), 0, 1000) == [0]


def test_the_tape_tells_what_has_struck() -> None:
    events = [
        {"kind": "run_started"},
        {"kind": "fault", "fault": "kill", "index": 2},
        {"kind": "fault", "fault": "died", "index": None},  # a real one
        {"kind": "fault", "fault": "kill", "index": 0},
        {"kind": "merge", "index": 1},
    ]
    assert struck_faults(events) == {0, 2}
    assert struck_faults([]) == set()
