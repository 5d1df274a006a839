"""The `chaos` group: every kind of fault strikes for real, once, and the run gets over it."""

import json
import time

import pytest

from actors.spec import LEDGER, SUPERVISOR, SYNCER
from app.run.history import History
from tests.cluster.audit import assert_every_sample_has_one_place, assert_no_work_counts_twice
from tests.cluster.harness import LiveRun, wait_for

pytestmark = pytest.mark.timeout(240)
CORRUPTIONS = ("flip", "nan", "shape", "version", "ahead", "replay")


def listed(*faults: dict) -> str:
    return f"chaos.faults={json.dumps(list(faults))}".replace('"', "")


def fault(run: LiveRun, kind: str) -> dict:
    """The fault's event, once it has struck."""
    return wait_for(f"{kind} strikes", lambda: next((e for e in run.events("fault") if e["fault"] == kind), None))


def recovery(run: LiveRun, kind: str) -> float:
    """Seconds until all was well again."""

    def look() -> float | None:
        history = History([event for kind in KINDS for event in run.events(kind)])
        return next((f.recovered_s for f in history.faults() if f.kind == kind), None)

    return wait_for(f"the run gets over {kind}", look)


KINDS = ("run_started", "placed", "join", "leave", "merge", "first_merge", "fault", "syncer_started", "back")


def test_faults_of_learners(start):
    run = start(
        "learners=4",
        "diloco.most_garbage=1000000",
        listed(
            {"kind": "kill", "target": "learner-0", "at_s": 0},
            {"kind": "slow", "target": "learner-1", "at_s": 0, "seconds": 2, "factor": 4},
            {"kind": "mute", "target": "learner-2", "at_s": 0, "seconds": 15},
            {"kind": "preempt", "target": "learner-3", "at_s": 4, "seconds": 1},
            *({"kind": "corrupt", "at_s": 4 + i, "seconds": 1, "how": how} for i, how in enumerate(CORRUPTIONS)),
            {"kind": "kill_worker", "at_s": 4 + len(CORRUPTIONS)},
        ),
    )
    wait_for("all have struck", lambda: len(run.events("fault")) >= 5 + len(CORRUPTIONS))
    for kind in ("kill", "slow", "mute", "preempt", "corrupt", "kill_worker"):
        assert recovery(run, kind) > 0
    muted = fault(run, "mute")
    while_muted = [m for m in run.events("merge") if muted["struck_at"] + 1 < m["at"] < muted["ends_at"]]
    assert len(while_muted) >= 2
    assert not any(c["learner"] == "learner-2" for merge in while_muted for c in merge["contains"])
    assert run.learner("learner-2").incarnation == muted["incarnation"]  # the same process goes on
    reasons = {event["reason"] for event in run.events("refused")}
    assert "corrupt" in reasons
    events = [event["id"] for event in run.events("fault")]
    assert len(events) == len(set(events)) == 5 + len(CORRUPTIONS)
    assert_no_work_counts_twice(run.events("merge"))
    summary = run.finish()
    work = summary["work"]
    assert work["processed"] == work["merged"] + sum(work["discarded"].values()) + work["outstanding"]
    assert_every_sample_has_one_place(run, summary)
    assert summary["samples"]["reissued"] > 0


def test_faults_of_services(start):
    run = start(
        listed(
            {"kind": "kill_ledger", "at_s": 0},
            {"kind": "kill_supervisor", "at_s": 0},  # the next one has to see the ledger's return
            {"kind": "kill_syncer", "at_s": 2},
            {"kind": "freeze_syncer", "at_s": 5, "seconds": 2},
            {"kind": "fill_disk", "at_s": 9, "seconds": 2},
        )
    )
    for kind in ("kill_ledger", "kill_syncer", "freeze_syncer", "kill_supervisor", "fill_disk"):
        fault(run, kind)
        assert recovery(run, kind) > 0
    full = fault(run, "fill_disk")
    wait_for("the journal can be written again", lambda: any(m["at"] > full["ends_at"] for m in run.events("merge")))
    assert any(full["struck_at"] < e["at"] < full["ends_at"] + 1 for e in run.events("journal_failed"))
    assert {event["target"] for event in run.events("back")} == {LEDGER, SUPERVISOR}
    assert len(run.events("syncer_started")) >= 2
    assert [
        len([e for e in run.events("fault") if e["fault"] == kind]) for kind in ("kill_supervisor", "fill_disk")
    ] == [1, 1]
    assert run.call(SYNCER, "status").work_exact
    assert_every_sample_has_one_place(run, run.finish())


def test_a_garbage_sender_is_fenced_off_and_replaced(start):
    run = start(listed({"kind": "corrupt", "target": "learner-1", "at_s": 0, "seconds": 3600, "how": "flip"}))
    struck = fault(run, "corrupt")
    left = wait_for("it is fenced", lambda: [e for e in run.events("leave") if e["reason"] == "garbage"])
    assert (left[0]["learner"], left[0]["incarnation"]) == ("learner-1", struck["incarnation"])
    assert recovery(run, "corrupt") > 0
    assert run.learner("learner-1").incarnation > struck["incarnation"]
    run.finish()


def test_a_site_goes_dark_and_comes_back(start):
    run = start(
        "learners=4",
        "+pools.dark.min_learners=2",
        listed({"kind": "kill_site", "target": "dark", "at_s": 2, "seconds": 4}),
    )
    dark = [name for name in run.config.learner_ids if run.config.pool_of(name).name == "dark"]
    faults = wait_for("the site is dark", lambda: (found := run.events("fault"))[1:] and found)
    assert {event["target"] for event in faults} == set(dark)
    wait_for("it is over", lambda: time.time() > faults[0]["ends_at"])
    meanwhile = [m for m in run.events("merge") if faults[0]["struck_at"] + 1 < m["at"] < faults[0]["ends_at"]]
    assert meanwhile
    assert not any(c["learner"] in dark for merge in meanwhile for c in merge["contains"])
    for name in dark:
        back = run.learner(name)
        wait_for(
            f"{name} is back", lambda name=name, b=back: run.merged_since(faults[0]["ends_at"], name, b.incarnation)
        )
    assert len(run.events("fault")) == 2
    run.finish()


@pytest.mark.slow
def test_faults_at_random(start):
    run = start("learners=3", "chaos.seed=3", "chaos.seconds=1", "chaos.rates.kill=600", "chaos.rates.freeze=600")
    wait_for("six faults", lambda: len(run.events("fault")) >= 6)
    faults = run.events("fault")
    assert {event["fault"] for event in faults} == {"kill", "freeze"}
    assert len({event["target"] for event in faults}) > 1
    run.wait_merges(4)
    run.finish()
