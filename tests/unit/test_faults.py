"""When the faults of a schedule strike, and whom."""

import statistics
from itertools import pairwise

import pytest

from app.config import ChaosConfig, ConfigError, Fault, Rates, load
from app.config.chaos import FAULT_KINDS
from app.run.faults import FaultPlan, struck_faults

FAULTS = [
    Fault("kill", "learner-1", at=0.4),
    Fault("freeze", "learner-2", at=0.1),
    Fault("kill_syncer", at=0.4),
    Fault("kill", "learner-0", at=1.0),
    Fault("mute", "learner-0", at_s=30.0),
]


def due(faults, struck=(), tokens=0, merging_s=None, **chaos) -> list[str]:
    return [planned.id for planned in FaultPlan(ChaosConfig(faults, **chaos), 1000).due(struck, tokens, merging_s)]


def test_nothing_strikes_before_its_moment() -> None:
    assert due(FAULTS, tokens=99, merging_s=29.9) == []
    assert due(FAULTS, tokens=99) == []
    assert due([], tokens=1000) == []


def test_everything_strikes_once_its_moment_has_come() -> None:
    assert due(FAULTS, tokens=100) == ["1"]
    assert due(FAULTS, tokens=400) == ["0", "1", "2"]
    assert due(FAULTS, tokens=1000) == ["0", "1", "2", "3"]
    assert due(FAULTS, merging_s=30.0) == ["4"]


def test_what_struck_does_not_strike_again() -> None:
    assert due(FAULTS, {"0", "1"}, 999) == ["2"]
    drawn = due([], merging_s=3600.0, rates=Rates(kill=20.0))
    assert due([], drawn[:3], merging_s=3600.0, rates=Rates(kill=20.0)) == drawn[3:]


def test_a_fault_at_the_start() -> None:
    assert due([Fault("kill", "learner-0", at=0.0)]) == ["0"]


def test_rates_are_poisson_processes_of_their_own() -> None:
    plan = FaultPlan(ChaosConfig(rates=Rates(kill=60.0, freeze=30.0), seconds=3.0), 1000)
    assert plan.due((), 0, None) == []
    hour = plan.due((), 0, 3600.0)
    day = plan.due((), 0, 24 * 3600.0)
    assert [planned for planned in day if planned.fault.at_s <= 3600.0] == hour
    for kind, rate in (("kill", 60.0), ("freeze", 30.0)):
        moments = [planned.fault.at_s for planned in day if planned.fault.kind == kind]
        assert len(moments) == pytest.approx(24 * rate, rel=0.15)
        gaps = [new - old for old, new in pairwise(moments)]
        assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.2)  # as of an exponential
        assert moments == sorted(moments)
    assert {planned.fault.kind for planned in day} == {"kill", "freeze"}
    assert all(planned.fault.seconds == 3.0 for planned in day)
    assert len({planned.id for planned in day}) == len(day)


def test_the_schedule_does_not_depend_on_how_often_it_is_asked() -> None:
    chaos = ChaosConfig(rates=Rates(kill=60.0, corrupt=60.0), seed=7)
    often, once = FaultPlan(chaos, 1), FaultPlan(chaos, 1)
    for second in range(600):
        often.due((), 0, float(second))
    assert {(p.id, p.fault) for p in often.due((), 0, 600.0)} == {(p.id, p.fault) for p in once.due((), 0, 600.0)}
    other = FaultPlan(ChaosConfig(rates=chaos.rates, seed=8), 1)
    assert {p.fault for p in other.due((), 0, 600.0)} != {p.fault for p in once.due((), 0, 600.0)}
    assert len({p.fault.how for p in once.due((), 0, 3600.0) if p.fault.kind == "corrupt"}) > 1


def test_the_victim_is_named_or_anybody_that_is_well() -> None:
    plan = FaultPlan(ChaosConfig(FAULTS, rates=Rates(kill=100.0)), 1000)
    named, *_ = plan.due((), 400, None)
    assert plan.victim(named, ["learner-0", "learner-1"]) == "learner-1"
    assert plan.victim(named, ["learner-0"]) is None
    drawn = [planned for planned in plan.due((), 0, 3600.0) if planned.id.startswith("kill-")]
    victims = {plan.victim(planned, ["b", "a", "c"]) for planned in drawn}
    assert victims == {"a", "b", "c"}
    assert [plan.victim(p, ["c", "a", "b"]) for p in drawn] == [plan.victim(p, ["a", "b", "c"]) for p in drawn]
    assert plan.victim(drawn[0], []) is None


def test_every_worker_of_a_learner_may_be_the_one_that_is_struck() -> None:
    plan = FaultPlan(ChaosConfig(rates=Rates(kill_worker=100.0)), 1000)
    drawn = plan.due((), 0, 3600.0)
    assert {plan.rank(planned, 3) for planned in drawn} == {0, 1, 2}
    assert [plan.rank(planned, 3) for planned in drawn] == [plan.rank(planned, 3) for planned in drawn]
    assert {plan.rank(planned, 1) for planned in drawn} == {0}


def test_the_tape_tells_what_has_struck() -> None:
    events = [
        {"kind": "run_started"},
        {"kind": "fault", "fault": "kill", "id": "2"},
        {"kind": "fault", "fault": "died", "id": None},  # a real one
        {"kind": "fault", "fault": "kill", "id": "kill-0"},
        {"kind": "merge", "id": "1"},
    ]
    assert struck_faults(events) == {"2", "kill-0"}
    assert struck_faults([]) == set()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("chaos.faults=[{kind: explode}]", "chaos.faults[0].kind"),
        ("chaos.faults=[{kind: kill, target: learner-9}]", "chaos.faults[0].target"),
        ("chaos.faults=[{kind: kill_syncer, target: learner-1}]", "chaos.faults[0].target"),
        ("chaos.faults=[{kind: kill_site, target: nowhere}]", "chaos.faults[0].target"),
        ("chaos.faults=[{kind: slow, factor: 0.5}]", "chaos.faults[0].factor"),
        ("chaos.faults=[{kind: corrupt, how: badly}]", "chaos.faults[0].how"),
        ("chaos.faults=[{at_s: -1}]", "chaos.faults[0].at_s"),
        ("chaos.rates.explode=1", "chaos.rates.explode"),
        ("chaos.rates.kill=-1", "chaos.rates.kill"),
        ("chaos.rates.kill_site=1", "chaos.rates.kill_site"),
        ("chaos.seconds=-1", "chaos.seconds"),
    ],
)
def test_a_wrong_schedule_is_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([override])
    assert error.value.key == key


def test_faults_may_have_no_target_or_that_of_their_kind() -> None:
    kinds = "[{kind: kill}, {kind: kill_ledger, target: ledger}, {kind: kill_site, target: 'x=a'}, {kind: fill_disk}]"
    assert len(load([f"chaos.faults={kinds}"]).chaos.faults) == 4
    assert load(["chaos.rates.kill=30", "chaos.rates.freeze=12.5"]).chaos.rates == Rates(kill=30.0, freeze=12.5)


def test_every_kind_but_one_that_needs_a_name_has_a_rate() -> None:
    assert {*vars(Rates()), "kill_site"} == set(FAULT_KINDS)
