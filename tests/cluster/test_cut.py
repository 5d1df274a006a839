"""Consistent cuts of a real run, and going on from one."""

import json

import psutil
import pytest

from actors.spec import SYNCER
from app.config import ConfigError
from app.run.cuts import FOLDER, Cuts
from tests.cluster.audit import assert_every_sample_has_one_place, assert_no_work_counts_twice
from tests.cluster.harness import LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(240)
CUTS = ("checkpoint.full=true", "checkpoint.full_every_s=1", "train.moments_every_steps=5")


def killed(run: LiveRun) -> None:
    """Everything dies at once, in the middle of its work."""
    pids = run.pids()
    run.close()
    for pid in pids:
        wait_for(f"{pid} is gone", lambda pid=pid: not psutil.pid_exists(pid))


def whole(run: LiveRun) -> list[str]:
    return [event["cut"] for event in run.events("cut")]


def sources_since(run: LiveRun, at: float) -> dict[str, str]:
    """Where each learner that joined after that had its optimizer state from."""
    return {event["learner"]: event["source"] for event in run.events("recovered") if event["at"] > at}


@pytest.mark.slow
def test_a_run_goes_back_to_a_cut_and_goes_on_as_if_nothing_had_been(start):
    run = start(*CUTS)
    run.wait_training()
    kill(run.learner("learner-1").pid)  # a cut is made without one that dies
    run.wait_training()
    wait_for("two cuts with both", lambda: [e for e in run.events("cut") if len(e["learners"]) == 2][1:])
    run.wait_merges(4)
    killed(run)

    cuts = Cuts(run.folder.checkpoints)
    cut = cuts.newest()
    learners = next(e["learners"] for e in run.events("cut") if e["cut"] == cut)
    syncer = cuts.part(cut, "syncer").meta
    parts = {name: cuts.part(cut, name).meta["replica"] for name in learners}
    assert len({name.split("/")[1] for name in run.folder.checkpoints.names(FOLDER)}) <= 3  # two, and one under way

    again = LiveRun(run.folder.work_dir, ["learners=2", *CUTS, "run.resume=cut"])
    try:
        started = wait_for("its syncer is back", lambda: again.events("syncer_started")[1:])[-1]
        assert started["versions"] == [fragment["version"] for fragment in syncer["fragments"]]
        for name, incarnation in learners.items():
            status = again.learner(name)
            assert (status.incarnation, status.tokens >= parts[name]["tokens"]) == (incarnation, True)
        at = started["at"]
        sources = wait_for("all are back", lambda: (s := sources_since(again, at)).keys() == learners.keys() and s)
        assert set(sources.values()) == {"cut"}
        for name, incarnation in learners.items():
            wait_for(f"{name}'s work is merged", lambda n=name, i=incarnation: again.merged_since(at, n, i))
        assert again.call(SYNCER, "status").work_exact
        assert not [e for e in again.events("refused") if e["at"] > at and e["reason"] in ("corrupt", "incarnation")]
        before = len(whole(again))
        wait_for("another cut", lambda: len(whole(again)) > before)
        kill(again.learner("learner-0").pid)  # who dies now does not come back as it was in the cut
        now = wait_for(
            "it is back", lambda: (s := again.learner("learner-0")).incarnation > learners["learner-0"] and s
        )
        again.merged_since(0, "learner-0", now.incarnation)
        summary = again.finish()
        assert summary["work"]["balanced"]
        samples = summary["samples"]
        assert samples["issued"] == samples["used"] + samples["returned"]
        assert samples["leased"] == 0
    finally:
        again.close()


@pytest.mark.parametrize("learners", [1, 3])
def test_a_resumed_run_takes_optimizer_state_from_the_cut_whatever_its_number_of_learners(start, learners):
    run = start(*CUTS)
    run.wait_training()
    wait_for("a cut", lambda: whole(run))
    stopped = run.finish()  # which makes one more
    last = whole(run)[-1]
    assert [e["at"] for e in run.events("cut")][-1] > run.events("finish")[0]["at"] - 60
    run.folder.lock.release()
    again = LiveRun(run.folder.work_dir, [f"learners={learners}", *CUTS, "run.resume=auto"])
    try:
        started = wait_for("its syncer is back", lambda: again.events("syncer_started")[1:])[-1]
        assert sum(started["versions"]) >= stopped["merges"]
        assert again.spec.cut == last
        again.wait_training()
        back = [e for e in again.events("recovered") if e["at"] > started["at"]]
        assert {e["source"] for e in back if e["learner"] == "learner-0"} == {"cut"}
        summary = again.finish()
        assert summary["tokens_processed"] > stopped["tokens_processed"]
        assert_no_work_counts_twice(again.events("merge"))
        assert_every_sample_has_one_place(again, summary)
    finally:
        again.close()


def test_without_a_cut_there_is_nothing_to_go_back_to(start):
    run = start()
    run.wait_merges(1)
    killed(run)
    before = json.dumps(sorted(run.folder.checkpoints.names("")))
    with pytest.raises(ConfigError, match=r"run\.resume=cut is refused: .*there is no consistent cut"):
        LiveRun(run.folder.work_dir, ["learners=2", "run.resume=cut"])
    assert json.dumps(sorted(run.folder.checkpoints.names(""))) == before
