"""Learners of several workers on a real Ray: they train as a group, die as one, and come back as one, alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray import cloudpickle
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors import rank as other_ranks
from actors.crew import Crew
from actors.driver import prepare_run
from app.config import load
from app.run.cuts import Cuts
from app.run.folder import open_folder
from below import gone
from tests.cluster.audit import assert_every_sample_has_one_place, assert_no_work_counts_twice, processes, remains
from tests.cluster.harness import TINY, LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
TWO = ("pools.local.workers_per_learner=2",)
SHARDED = (*TWO, "pools.local.sharded=true")
HANG_S = 6
SHARING = pytest.mark.parametrize("group", [TWO, SHARDED], ids=["ddp", "fsdp2"])
DDP_FIRST = pytest.mark.parametrize(
    "group", [pytest.param(TWO, id="ddp"), pytest.param(SHARDED, id="fsdp2", marks=pytest.mark.slow)]
)
FSDP2_FIRST = pytest.mark.parametrize(
    "group", [pytest.param(TWO, id="ddp", marks=pytest.mark.slow), pytest.param(SHARDED, id="fsdp2")]
)


def completed(run: LiveRun) -> dict:
    summary = run.wait_done()
    assert summary["status"] == "completed"
    assert summary["work"]["balanced"]
    assert summary["tokens_processed"] >= run.config.train.tokens
    assert summary["eval_loss_final"] < summary["eval_loss_first"]
    assert_no_work_counts_twice(run.events("merge"))
    assert_every_sample_has_one_place(run, summary)
    wait_for("nothing is left in the cluster", lambda: not remains(run.spec))
    return summary


def assert_steps_of(run: LiveRun, samples: dict[str, int]) -> None:
    """A step of each learner has so many samples, whoever of its workers took them, and is weighted so."""
    entries = [entry for merge in run.events("merge") if not merge["final"] for entry in merge["contains"]]
    assert {entry["learner"] for entry in entries} == set(samples)
    for entry in entries:
        tokens, steps = entry["c_tokens"], entry["c_steps"]
        assert tokens == steps * samples[entry["learner"]] * 32
        assert entry["weight"] == pytest.approx(tokens * tokens / steps)


@SHARING
def test_groups_train_to_the_budget(start, group):
    run = start("train.tokens=24000", "train.gradient_checkpointing=true", *group)
    completed(run)
    assert_steps_of(run, {"learner-0": 2 * 2, "learner-1": 2 * 2})


@pytest.mark.slow
def test_pools_of_single_workers_and_of_groups_share_a_run(start):
    pools = ("+pools.pair.workers_per_learner=2", "+pools.pair.sharded=true", "+pools.pair.batch_size=3")
    run = start(*pools, "+pools.pair.min_learners=1", "+pools.pair.accumulation=2")
    for learner in ("learner-0", "learner-1"):
        wait_for(f"{learner}'s work is merged", lambda name=learner: run.merged_since(0, name, 1))
    summary = run.finish()
    assert summary["work"]["balanced"]
    assert_every_sample_has_one_place(run, summary)
    assert_steps_of(run, {"learner-0": 2, "learner-1": 2 * 3 * 2})


# ---- what dies


def back_again(run: LiveRun, before) -> object:
    """learner-1, once it is merged under a new incarnation; nothing is left of the group that it was."""
    back = wait_for(
        "it is back", lambda: (s := run.status("learner-1")) and s.incarnation > before.incarnation and s.ranks and s
    )
    old = {before.pid, *(rank.pid for rank in before.ranks)}
    new = {back.pid, *(rank.pid for rank in back.ranks)}
    assert old.isdisjoint(new)
    assert not any(psutil.pid_exists(pid) and not gone(psutil.Process(pid)) for pid in old)
    wait_for("its work is merged", lambda: run.merged_since(0, "learner-1", back.incarnation))
    assert len(processes("Rank")) == len(run.config.learner_ids)
    return back


def groups(run: LiveRun) -> dict[str, str]:
    """Placement groups of the run, with their states."""
    names = {run.spec.group_name(learner) for learner in run.config.learner_ids}
    return {id: entry["state"] for id, entry in placement_group_table().items() if entry["name"] in names}


def sources(run: LiveRun) -> list[str]:
    return [event["source"] for event in run.events("recovered") if event["learner"] == "learner-1"]


@DDP_FIRST
def test_whichever_rank_dies_or_hangs_its_group_starts_anew_alone(start, group):
    run = start(f"diloco.hang_min_s={HANG_S}", "diloco.hang_steps=1", "train.moments_every_steps=5", *group)
    run.wait_training()
    witness, places = run.learner("learner-0"), groups(run)
    assert len(places) == 2
    wait_for("it has moments to give", lambda: run.try_call("learner-0", "moments") is not None)
    for strike in (killed_rank_1, killed_rank_0, stopped_rank_1, stopped_rank_0):
        victim = wait_for("learner-1 is whole", lambda: (s := run.learner("learner-1")).ranks and s)
        strike(run, victim)
        back_again(run, victim)
    now = run.learner("learner-0")
    assert (now.incarnation, now.pid, now.ranks) == (1, witness.pid, witness.ranks)
    assert now.steps > witness.steps
    assert groups(run) == places == dict.fromkeys(places, "CREATED")
    assert sources(run) == ["fresh"] + 4 * ["learner-0"]
    assert {event["learner"] for event in run.events("leave")} == {"learner-1"}
    summary = run.finish()
    assert summary["work"]["balanced"]
    assert_every_sample_has_one_place(run, summary)
    wait_for("nothing is left in the cluster", lambda: not remains(run.spec))


def killed_rank_1(run, victim):
    kill(victim.ranks[0].pid)


def killed_rank_0(run, victim):
    kill(victim.pid)


def stopped_rank_1(run, victim):
    os.kill(victim.ranks[0].pid, signal.SIGSTOP)
    run.wait_merges(2)  # without it


def stopped_rank_0(run, victim):
    """The other rank hears nothing any more, and leaves before anybody tells it to."""
    os.kill(victim.pid, signal.SIGSTOP)
    run.wait_merges(2)


@SHARING
def test_a_group_that_gets_sigterm_hands_in_whole(start, group):
    run = start(*group)
    run.wait_training()
    victim = wait_for("learner-1 is whole", lambda: (s := run.learner("learner-1")).ranks and s)
    for pid in (*(rank.pid for rank in victim.ranks), victim.pid):
        os.kill(pid, signal.SIGTERM)
    left = wait_for("it has left", lambda: run.events("leave"))
    assert [(event["learner"], event["reason"]) for event in left] == [("learner-1", "left")]
    back_again(run, victim)
    assert "died" not in run.finish()["work"]["discarded"]


class Failing(other_ranks.Rank):
    """A rank that can't do its part."""

    def follow(self, *_: object) -> None:
        raise MemoryError("there is no room for its part")


class Parent:
    """Rank 0's process, as far as this is about it."""

    def __init__(self, spec):
        self.told = []
        other_ranks.Rank = Failing
        self.crew = Crew(spec, "learner-0", other_ranks.start_ranks(spec, "learner-0"), self.told.append)
        self.crew.call(257)

    def why(self):
        while not self.told:
            time.sleep(0.05)
        self.crew.broken("somebody is gone")  # returns, as somebody has said why
        return self.told


def test_a_rank_that_fails_by_itself_says_why(cluster, tmp_path):
    config = load([*TINY, f"run.dir={tmp_path / 'run'}", *TWO])
    folder = open_folder(config)
    group = placement_group([{"CPU": 0.25}] * 2)
    try:
        spec = prepare_run(config, folder)
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        parent = ray.remote(Parent).options(num_cpus=0.25, scheduling_strategy=place).remote(spec)
        (why,) = ray.get(parent.why.remote(), timeout=60)
        assert "there is no room for its part" in why
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        remove_placement_group(group)
        folder.lock.release()


def test_chaos_kills_one_worker_of_a_group(start):
    run = start("chaos.faults=[{kind: kill_worker, target: learner-1, at_s: 0}]", *TWO)
    fault = wait_for("it strikes", lambda: run.events("fault"))[0]
    wait_for("it is back", lambda: run.merged_since(0, "learner-1", fault["incarnation"] + 1))
    assert not psutil.pid_exists(fault["pid"])
    recoveries = [f["recovered_s"] for f in run.finish()["faults"] if f["kind"] == "kill_worker"]
    assert len(recoveries) == 1
    assert recoveries[0] > 0


# ---- what is kept


@FSDP2_FIRST
def test_a_group_goes_on_from_a_consistent_cut_and_from_its_own_checkpoint(start, group):
    cuts = ("checkpoint.full=true", "checkpoint.full_every_s=1")
    moments = ("train.recovery=checkpoint", "train.moments_every_s=0.3", "train.moments_every_steps=5")
    run = start(*cuts, *moments, *group)
    run.wait_training()
    path = run.spec.work_dir / "checkpoints" / "learners" / "learner-1.safetensors"
    wait_for("its optimizer state is written", path.exists)
    victim = run.learner("learner-1")
    kill(victim.ranks[0].pid)
    back = back_again(run, victim)
    assert sources(run) == ["fresh", "checkpoint"]
    wait_for(
        "a cut with it", lambda: [e for e in run.events("cut") if e["learners"].get("learner-1") == back.incarnation]
    )
    pids = [*run.pids(), *(rank.pid for name in run.config.learner_ids for rank in run.learner(name).ranks)]
    run.close()
    for pid in pids:
        wait_for(f"{pid} is gone", lambda pid=pid: not psutil.pid_exists(pid))

    found = Cuts(run.folder.checkpoints)
    learners = next(e["learners"] for e in run.events("cut") if e["cut"] == found.newest())
    parts = {name: found.part(found.newest(), name).meta["replica"] for name in learners}
    again = LiveRun(run.folder.work_dir, ["learners=2", *cuts, *moments, *group, "run.resume=cut"])
    try:
        for name, incarnation in learners.items():
            status = again.learner(name)
            assert (status.incarnation, status.tokens >= parts[name]["tokens"]) == (incarnation, True)
        at = again.events("syncer_started")[-1]["at"]
        for name, incarnation in learners.items():
            wait_for(f"{name}'s work is merged", lambda n=name, i=incarnation: again.merged_since(at, n, i))
        back = [e["source"] for e in again.events("recovered") if e["at"] > at]
        assert back == ["cut"] * len(learners)
        assert again.finish()["work"]["balanced"]
    finally:
        again.close()


DRIVER = """
import sys, ray
from pathlib import Path
from tests.cluster.harness import LiveRun
ray.init(address=sys.argv[1], namespace="another", log_to_driver=False, logging_level="error")
run = LiveRun(Path(sys.argv[2]), sys.argv[3:])
run.wait_training()
print("training", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_groups_outlive_their_driver(cluster, tmp_path):
    address = ray.get_runtime_context().gcs_address
    overrides = ["learners=2", *TWO]
    command = [sys.executable, "-c", DRIVER, address, str(tmp_path / "run"), *overrides]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "bench")])
    driver = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    run = None
    try:
        assert driver.stdout is not None
        assert any(line.strip() == b"training" for line in driver.stdout)
        kill(driver.pid)
        died = time.time()
        run = LiveRun(tmp_path / "run", [*overrides, "run.resume=auto"])
        for name in run.config.learner_ids:
            wait_for("it is merged", lambda name=name: run.merged_since(died + 2, name, 1))
            status = run.learner(name)
            assert status.incarnation == 1
            assert all(psutil.pid_exists(rank.pid) for rank in status.ranks)
        assert run.finish()["work"]["balanced"]
    finally:
        driver.kill()
        driver.wait()
        if run is not None:
            run.close()
