"""Facts of a run from event lists made by hand, with figures worked out by hand."""

from typing import Any

import pytest

from app.run.attempts import without_pauses
from app.run.facts import FaultFacts, MergeFacts
from app.run.final_report import Recovery
from app.run.history import Event, History


def event(at: float, kind: str, **fields: Any) -> Event:
    return {"kind": kind, "at": at, **fields}


def join(at: float, incarnation: int, learner: str = "learner-0", actor: float = 0.0) -> Event:
    """Its process was up at `actor`, had imported a second later and built its model half a second after that."""
    timeline = {"process": actor - 0.5, "actor": actor, "imported": actor + 1.0, "built": actor + 1.5}
    return event(at, "join", learner=learner, incarnation=incarnation, pool="local", timeline=timeline)


def sample(at: float, steps: int, incarnation: int = 1, step_time: float = 0.5, learner: str = "learner-0") -> Event:
    fields = {"learner": learner, "incarnation": incarnation, "steps": steps, "tokens": 10 * steps}
    return event(at, "learner", **fields, step_time=step_time, loss=1.0)


def merge(at: float, *contains: tuple[str, int], live: int = 2) -> Event:
    given = [{"learner": learner, "incarnation": incarnation} for learner, incarnation in contains]
    return event(at, "merge", contains=given, live=live)


def first_merge(at: float, incarnation: int, learner: str = "learner-0") -> Event:
    return event(at, "first_merge", learner=learner, incarnation=incarnation, fragment=0)


def fault(at: float, kind: str, target: str = "learner-0", incarnation: int = 1, lasts: float = 0.0) -> Event:
    fields = {"fault": kind, "target": target, "incarnation": incarnation, "id": "0"}
    return event(at, "fault", **fields, struck_at=at, ends_at=at + lasts)


def leave(at: float, incarnation: int, learner: str = "learner-0") -> Event:
    return event(at, "leave", learner=learner, incarnation=incarnation, reason="died")


def syncer(at: float, epoch: int, cpu_s: float, merge_s: float, up: int) -> Event:
    traffic = {"up": up, "down": 2 * up, "up_fp32": 4 * up, "down_fp32": 8 * up}
    return event(at, "syncer", epoch=epoch, cpu_s=cpu_s, merge_s=merge_s, traffic=traffic)


START = [
    event(100.0, "syncer_started", epoch=2),
    event(101.0, "run_started", attempt="a"),
    event(101.0, "placed", learner="learner-0", pool="local"),
    event(101.5, "placed", learner="learner-1", pool="local"),
    join(105.0, 1, "learner-0", actor=102.0),
    join(105.5, 1, "learner-1", actor=102.0),
]


def test_merges() -> None:
    history = History(
        [*START, merge(110.0, ("learner-0", 1)), merge(112.0, ("learner-0", 1), ("learner-1", 1), live=3)]
    )
    assert history.merges() == (MergeFacts(110.0, 1, 2), MergeFacts(112.0, 2, 3))


def test_the_phases_of_a_recovery_add_up() -> None:
    events = [
        *START,
        fault(120.0, "kill"),
        leave(120.4, 1),
        merge(122.0, ("learner-1", 1)),
        join(124.0, 2, actor=122.0),
        first_merge(124.5, 1, "learner-1"),
        first_merge(125.0, 2),
    ]
    history = History(events)
    (recovery,) = history.recoveries()
    phases = {"detect": 0.4, "start": 1.6, "import": 1.0, "build": 0.5, "join": 0.5, "first merge": 1.0}
    assert recovery.phases == pytest.approx(phases)
    assert recovery.total_s == pytest.approx(5.0)
    assert recovery.total_s == pytest.approx(sum(recovery.phases.values()))
    assert history.faults() == (FaultFacts("kill", "learner-0", 20.0, pytest.approx(5.0)),)
    assert history.learner("learner-0", (0, 0)).recoveries_s == pytest.approx((5.0,))
    assert history.learner("learner-1", (0, 0)).recoveries_s == ()


def test_a_death_that_was_noticed_after_the_restart() -> None:
    """The fault is noted when the new process has joined already: its join is the one that mends it."""
    events = [
        *START,
        leave(130.0, 1),
        join(130.0, 2, actor=128.0),
        fault(130.3, "died"),
        first_merge(131.0, 2),
        fault(140.0, "kill", incarnation=2),
        join(145.0, 3, actor=142.0),
        first_merge(147.0, 3),
    ]
    first, second = History(events).recoveries()
    assert first.total_s == pytest.approx(3.0)  # from the new process' start at 128
    assert first.phases["detect"] == 0.0
    assert all(seconds >= 0 for seconds in first.phases.values())
    assert second.total_s == pytest.approx(7.0)


def test_a_death_that_nobody_told_is_detected_by_the_new_process() -> None:
    (recovery,) = History(
        [*START, fault(120.0, "kill"), join(124.0, 2, actor=122.0), first_merge(125.0, 2)]
    ).recoveries()
    assert (recovery.phases["detect"], recovery.phases["start"]) == (2.0, 0.0)


def test_a_recovery_that_did_not_come() -> None:
    (gone,) = History([*START, fault(120.0, "kill"), leave(121.0, 1)]).recoveries()
    assert gone == Recovery("kill", "learner-0", {}, None)
    (unmerged,) = History([*START, fault(120.0, "kill"), join(124.0, 2, actor=122.0)]).recoveries()
    assert unmerged.total_s is None
    assert set(unmerged.phases) == {"detect", "start", "import", "build", "join"}


def test_the_work_of_an_older_incarnation_is_no_recovery() -> None:
    events = [*START, fault(120.0, "kill"), first_merge(120.1, 1), merge(120.2, ("learner-0", 1))]
    assert History(events).recoveries()[0].total_s is None


def test_a_frozen_learner_that_goes_on() -> None:
    events = [
        *START,
        fault(120.0, "freeze", lasts=20.0),
        merge(121.0, ("learner-0", 1), ("learner-1", 1)),  # was captured before
        merge(141.0, ("learner-1", 1)),
        merge(142.5, ("learner-1", 1), ("learner-0", 1)),
    ]
    assert History(events).recoveries() == (Recovery("freeze", "learner-0", {}, 22.5),)


def test_a_frozen_learner_that_is_replaced() -> None:
    events = [
        *START,
        fault(120.0, "freeze", lasts=20.0),
        leave(136.0, 1),
        join(139.0, 2, actor=137.0),
        first_merge(141.0, 2),
        merge(141.0, ("learner-0", 2)),
    ]
    (recovery,) = History(events).recoveries()
    assert recovery.total_s == pytest.approx(21.0)
    assert recovery.phases["detect"] == pytest.approx(16.0)


def test_a_frozen_learner_that_goes_on_and_dies_later() -> None:
    events = [
        *START,
        fault(120.0, "freeze", lasts=5.0),
        merge(126.0, ("learner-0", 1)),
        fault(150.0, "kill"),
        join(154.0, 2, actor=152.0),
        first_merge(155.0, 2),
    ]
    assert [recovery.total_s for recovery in History(events).recoveries()] == pytest.approx([6.0, 5.0])


def test_the_recovery_of_the_syncer() -> None:
    events = [
        *START,
        fault(120.0, "kill_syncer", target="syncer", incarnation=0),
        event(121.5, "syncer_started", epoch=3),
        merge(124.0, ("learner-0", 1)),
    ]
    history = History(events)
    (recovery,) = history.recoveries()
    assert recovery == Recovery("kill_syncer", "syncer", {"start": 1.5, "first merge": 2.5}, 4.0)
    assert history.syncer().recoveries_s == (4.0,)
    assert history.syncer().incarnations == 2
    (away,) = History(events[:-2]).recoveries()
    assert away == Recovery("kill_syncer", "syncer", {}, None)
    (idle,) = History(events[:-1]).recoveries()
    assert idle == Recovery("kill_syncer", "syncer", {"start": 1.5}, None)


@pytest.mark.parametrize("told", [True, False])
def test_a_takeover_is_a_recovery_whether_or_not_anybody_saw_the_fault(told: bool) -> None:
    started = [event(0, "syncer_started", epoch=2), event(20, "syncer_started", epoch=3, silent_since=18.0)]
    faults = [fault(17.5, "kill_syncer", "syncer", incarnation=2)] if told else []
    history = History([started[0], *faults, started[1], merge(21, ("learner-0", 1))])
    struck = 17.5 if told else 18.0
    phases = {"start": 20 - struck, "first merge": 1.0}
    kind = "kill_syncer" if told else "died"
    assert history.recoveries() == (Recovery(kind, "syncer", phases, 21 - struck),)
    assert history.syncer().recoveries_s == (21 - struck,)


def test_figures_of_the_syncer_add_up_over_its_incarnations() -> None:
    events = [*START, syncer(110.0, 2, 1.0, 0.2, 100), syncer(112.0, 2, 3.0, 0.5, 300), syncer(115.0, 3, 0.5, 0.1, 50)]
    history = History(events)
    assert history.syncer().cpu_s == pytest.approx(3.5)
    assert history.syncer().merge_s == pytest.approx(0.6)
    assert [history.traffic(what) for what in ("up", "down", "up_fp32", "down_fp32")] == [350, 700, 1400, 2800]


def test_a_learners_facts() -> None:
    events = [*START, sample(106.0, 2), sample(108.0, 6), sample(110.0, 10), event(111.0, "run_ended")]
    facts = History(events).learner("learner-0", (10, 100))
    assert (facts.pool, facts.incarnations, facts.steps, facts.tokens) == ("local", 1, 10, 100)
    assert facts.step_s == pytest.approx(5.0)
    assert facts.stepping == ((105.0, 106.0), (106.0, 108.0), (108.0, 110.0))
    assert facts.allocated_s == pytest.approx(10.0)


def test_each_incarnation_starts_at_no_steps() -> None:
    events = [
        *START,
        sample(106.0, 2),
        sample(108.0, 6),
        sample(120.0, 1, incarnation=2),
        sample(122.0, 5, incarnation=2),
    ]
    facts = History(events).learner("learner-0", (11, 110))
    assert facts.step_s == pytest.approx(5.5)
    assert facts.stepping == ((105.0, 106.0), (106.0, 108.0), (119.5, 120.0), (120.0, 122.0))


def test_no_steps_no_stepping() -> None:
    events = [*START, sample(106.0, 2), sample(108.0, 2), sample(110.0, 2)]
    assert History(events).learner("learner-0", (2, 20)).stepping == ((105.0, 106.0),)


def test_a_frozen_learner_does_not_step() -> None:
    """Frozen from 108 to 128: the sample at 130 tells of 4 steps since the one at 108."""
    events = [*START, sample(106.0, 2), sample(108.0, 6), sample(130.0, 10)]
    assert History(events).learner("learner-0", (10, 100)).stepping[-1] == (128.0, 130.0)


def test_time_for_data_and_messages_is_stepping_too() -> None:
    events = [*START, sample(106.0, 2), sample(110.0, 6, step_time=0.6)]  # 2.4 of 4 seconds inside the steps
    assert History(events).learner("learner-0", (6, 60)).stepping[-1] == (106.0, 110.0)


def test_a_syncer_that_was_stopped_may_go_on_or_be_replaced() -> None:
    frozen = fault(110.0, "freeze_syncer", "syncer", 1) | {"ends_at": 115.0}
    went_on = [*START, frozen, event(116.0, "merge", live=2, contains=[])]
    assert [f.recovered_s for f in History(went_on).faults()] == [6.0]
    replaced = [*START, frozen, event(113.0, "syncer_started", epoch=2), event(117.5, "merge", live=2, contains=[])]
    assert [f.recovered_s for f in History(replaced).faults()] == [7.5]
    assert [f.recovered_s for f in History([*START, frozen]).faults()] == [None]


def test_the_budget_is_reached_once_in_an_attempt() -> None:
    ends = [event(150.0, "finish", reason="budget"), event(170.0, "finish", reason="budget")]
    assert History([*START, *ends]).budget_at() == 150.0


def test_first_step_and_budget() -> None:
    history = History([*START, sample(107.0, 1, learner="learner-1"), sample(107.5, 2)])
    assert history.first_step_at() == pytest.approx(106.5)
    assert history.budget_at() is None
    ends = [event(150.0, "finish", reason="SIGTERM"), event(160.0, "finish", reason="budget")]
    assert History([*START, *ends]).budget_at() == 160.0
    assert History(START).first_step_at() is None


def test_a_learner_that_never_joined() -> None:
    history = History([*START, event(101.6, "placed", learner="learner-2", pool="local")])
    assert history.learners() == ["learner-0", "learner-1", "learner-2"]
    facts = history.learner("learner-2", (0, 0))
    assert (facts.pool, facts.incarnations, facts.stepping) == ("", 0, ())


def test_the_time_between_two_attempts_does_not_count() -> None:
    """The first attempt lives for 20 s, the second, 980 s later, for 12 s; its syncer starts before it is noted."""
    events = [
        *START,
        sample(119.0, 20),
        merge(120.0, ("learner-0", 1)),
        event(1100.0, "syncer_started", epoch=3),
        event(1101.0, "run_started", attempt="b"),
        event(1102.0, "placed", learner="learner-0", pool="local"),
        join(1105.0, 2, actor=1103.0),
        event(1112.0, "run_ended"),
    ]
    history = History(events)
    assert history.wall_s == pytest.approx(20.0 + 12.0)
    assert history.learner("learner-0", (0, 0)).allocated_s == pytest.approx(19.0 + 10.0)
    assert history.learner("learner-1", (0, 0)).allocated_s == pytest.approx(18.5)
    assert history.learner("learner-0", (0, 0)).incarnations == 2


def test_a_restart_of_the_syncer_is_no_new_attempt() -> None:
    events = [*START, event(110.0, "syncer_started", epoch=3), event(125.0, "run_ended")]
    assert History(events).wall_s == pytest.approx(25.0)
    assert History(events).learner("learner-0", (0, 0)).allocated_s == pytest.approx(24.0)


def test_a_syncer_that_died_last_belongs_to_its_own_attempt() -> None:
    events = [
        *START,
        event(110.0, "syncer_started", epoch=3),
        event(500.0, "syncer_started", epoch=4),
        event(501.0, "run_started", attempt="b"),
        event(505.0, "run_ended"),
    ]
    assert History(events).wall_s == pytest.approx(10.0 + 5.0)


def test_without_pauses_a_night_off_is_no_gap() -> None:
    events = [
        *START,
        merge(118.0, ("learner-0", 1)),
        event(120.0, "run_ended"),
        event(1100.0, "run_started", attempt="b"),
        join(1105.0, 2, actor=1103.0),
        merge(1106.0, ("learner-0", 2)),
        fault(1110.0, "kill"),
        event(1112.0, "run_ended"),
    ]
    history = History(without_pauses(events))
    assert [m.at for m in history.merges()][-2:] == pytest.approx([118.0, 126.0])
    assert history.of("join")[-1]["timeline"]["actor"] == pytest.approx(123.0)
    assert history.of("fault")[-1]["struck_at"] == pytest.approx(130.0)
    assert history.wall_s == pytest.approx(History(events).wall_s) == pytest.approx(20.0 + 12.0)
    assert without_pauses(events[:3]) == events[:3]


def test_nothing_on_the_tape_is_a_history_too() -> None:
    history = History(without_pauses([]))
    assert (history.started_at, history.ended_at, history.wall_s) == (0.0, 0.0, 0)
    assert (history.learners(), history.merges(), history.faults()) == ([], (), ())


def test_a_learner_that_comes_and_goes_is_paid_for_while_it_has_a_place() -> None:
    events = [
        *START,
        event(110.0, "placed", learner="spot-0", pool="spot"),
        event(114.0, "removed", learner="spot-0", reason="its node is gone"),
        event(120.0, "placed", learner="spot-0", pool="spot"),
        event(130.0, "ended"),
        event(131.0, "removed", learner="spot-0", reason="after the end"),
        event(140.0, "run_ended"),
    ]
    assert History(events).learner("spot-0", (0, 0)).allocated_s == pytest.approx(4.0 + 10.0)
    assert History(events).learner("learner-1", (0, 0)).allocated_s == pytest.approx(28.5)
    assert History(events).learner("nobody-0", (0, 0)).allocated_s == 0.0
