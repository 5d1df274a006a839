"""One run from start to end, and every way to interrupt and continue it."""

import json
import os
import re
import signal

import pytest

from tests.cluster.audit import processes
from tests.cluster.harness import wait_for

pytestmark = pytest.mark.timeout(400)

CONTRACT = {
    "status", "tokens_budget", "tokens_processed", "tokens_merged", "tokens_discarded", "merges", "global_step",
    "eval_loss_first", "eval_loss_final", "eval_bits_per_byte", "wall_s", "goodput", "uptime", "participation",
    "max_merge_gap_s", "learners", "syncer", "bytes", "faults", "versions",
}  # fmt: skip


def test_a_run_ends_with_a_model_and_is_not_overwritten(command, completed):
    first = completed
    summary = first.summary()
    assert set(summary) >= CONTRACT
    assert summary["status"] == "completed"
    assert summary["tokens_processed"] >= summary["tokens_budget"] == 60000
    assert summary["eval_loss_final"] < summary["eval_loss_first"]
    assert set(summary["learners"]) == {"learner-0", "learner-1"}
    assert summary["bytes"]["up"] == summary["bytes"]["up_fp32"] > 0
    work = summary["work"]
    assert work["outstanding"] == 0
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    assert summary["tokens_processed"] == summary["tokens_merged"] + sum(summary["tokens_discarded"].values())
    for text in ("eval loss:", "gzip -9", "a sample from the trained model", str(first.folder)):
        assert text in first.output
    rules = re.findall(r" (mean|rda) +([a-z_.0-9]+)", first.output)
    assert {rule for rule, tensor in rules if tensor.startswith("model.layers.") and "proj" in tensor} == {"rda"}
    assert {rule for rule, tensor in rules if tensor.startswith("model.embed_tokens")} == {"mean"}
    assert list(first.folder.glob("wandb/offline-run-*"))
    assert (first.folder / "model" / "model.safetensors").is_file()
    assert "Setting up" not in first.output

    before = (first.folder / "summary.json").read_bytes(), (first.folder / "config.yaml").read_bytes()
    again = command("train.tokens=60000", folder=first.folder)
    assert again.wait() == 2
    assert "run.resume=auto" in again.output.splitlines()[-1]
    assert before == ((first.folder / "summary.json").read_bytes(), (first.folder / "config.yaml").read_bytes())
    resumed = command("train.tokens=60000", "tracking=wandb", "run.resume=auto", folder=first.folder)
    assert resumed.wait() == 0
    assert "completed already" in resumed.output


def test_sigterm_checkpoints_and_the_same_command_goes_on(command, repository):
    folder = repository / "runs" / "stopped"  # relative paths start at the root of the repository
    same = ("run.dir=null", "run.name=stopped")
    first = command("train.tokens=1000000000", *same, folder=folder)
    first.wait_merges(6)
    family = first.family()
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 143, first.output
    stopped = first.summary()
    assert stopped["status"] == "stopped"
    assert stopped["work"]["outstanding"] == 0
    wait_for("no process is left", lambda: not any(process.is_running() for process in family))

    budget = stopped["tokens_processed"] + 30000
    second = command(f"train.tokens={budget}", "run.resume=auto", *same, folder=folder)
    assert second.wait() == 0, second.output
    assert str(folder) in second.output
    summary = second.summary()
    assert summary["status"] == "completed"
    assert summary["global_step"] > stopped["global_step"]
    assert summary["merges"] > stopped["merges"]
    assert summary["tokens_processed"] >= budget
    assert summary["work"]["processed"] == summary["work"]["merged"] + sum(summary["work"]["discarded"].values())


@pytest.mark.slow
def test_a_silent_supervisor_is_restarted_by_the_driver_and_ctrl_c_exits_130(command):
    first = command("train.tokens=1000000000", "supervisor.silent_s=8")
    first.wait_merges(2)
    (silent,) = processes("Supervisor", root=first.process.pid)
    silent.suspend()
    wait_for("another one is there", lambda: [p for p in processes("Supervisor", first.process.pid) if p != silent])
    first.wait_merges(len(first.events("merge")) + 2)
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130, first.output
    assert first.summary()["status"] == "stopped"
    assert not silent.is_running()
    assert first.output.count("the supervisor does not answer") == 1
    assert {event["incarnation"] for event in first.events("join")} == {1}  # the others never noticed


def test_a_second_ctrl_c_leaves_at_once_and_takes_all_processes_along(command):
    run = command("train.tokens=1000000000")
    run.wait_merges(2)
    family = run.family()
    (syncer,) = processes("Syncer", run.process.pid)
    syncer.suspend()  # so that the last round can't come
    run.process.send_signal(signal.SIGINT)
    wait_for("it was heard", lambda: "SIGINT: last round" in run.output)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    wait_for("no process is left", lambda: not any(process.is_running() for process in family), 30.0)


def test_a_killed_driver_takes_its_own_cluster_along_and_the_run_goes_on_from_the_journal(command, leaving):
    first = command("train.tokens=1000000000")
    first.wait_merges(6)
    leaving += first.family()
    actors = processes(root=first.process.pid)
    os.kill(first.process.pid, signal.SIGKILL)
    wait_for("its actors are gone", lambda: not any(process.is_running() for process in actors))
    merged = {}
    for merge in first.events("merge"):
        merged[merge["fragment"]] = merge["version"]

    tokens = first.events("merge")[-1]["tokens"]
    second = command(f"train.tokens={tokens + 40000}", "run.resume=auto")
    assert second.wait() == 0, second.output
    started = second.events("syncer_started")[-1]
    assert all(started["versions"][p] >= version for p, version in merged.items())
    assert second.summary()["status"] == "completed"


@pytest.mark.slow
def test_on_a_cluster_started_apart_the_run_outlives_its_driver_and_is_attached_to(command, ray_head):
    env = {"RAY_ADDRESS": ray_head}
    first = command("train.tokens=1000000000", env=env)
    first.wait_merges(4)
    second_driver = command("train.tokens=1000000000", "run.resume=auto", env=env)
    assert second_driver.wait() == 2, second_driver.output  # one driver at a time
    assert "one at a time" in second_driver.output
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    joins = len(first.events("join"))

    others = ("train.tokens=2000000000", "learners=3", "diloco.min_quorum=2", "run.resume=auto")  # for another start
    second = command(*others, env=env)
    wait_for("the second driver attaches", lambda: "attached to the living run" in second.output, 100.0)
    wait_for("it shows the run as it is", lambda: "of 1,000,000,000 tokens" in second.output)
    second.wait_merges(len(second.events("merge")) + 4)
    assert "quorum 1" in second.output
    assert "learner-1:" in second.output
    assert "learner-2" not in second.output
    second.process.send_signal(signal.SIGTERM)
    assert second.wait(100) == 143, second.output
    assert len(second.events("join")) == joins + len(second.events("fault"))  # the same learners go on
    assert second.events("syncer_started")[-1]["epoch"] == 2
    summary = json.loads((second.folder / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["work"]["outstanding"] == 0


def test_chaos_kills_a_learner_and_the_summary_records_its_recovery(command):
    kill = "{kind: kill, target: learner-1, at: 0.00001}"
    run = command("train.tokens=1000000000", f"chaos.faults=[{kill}]")
    wait_for("its work is merged again", lambda: len(run.events("first_merge")) >= 3, 200.0)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    summary = run.summary()
    (fault,) = summary["faults"]
    assert (fault["kind"], fault["target"]) == ("kill", "learner-1")
    assert fault["recovered_s"] > 0
    assert summary["learners"]["learner-1"]["incarnations"] == 2
    assert summary["learners"]["learner-1"]["recoveries_s"] == [fault["recovered_s"]]
    assert summary["work"]["discarded"]["died"] > 0
    assert summary["work"]["processed"] == summary["work"]["merged"] + sum(summary["work"]["discarded"].values())
    assert "learner-1 is back as incarnation 2" in run.output
    recovered = next(line for line in run.output.splitlines() if line.startswith("recovered: learner-1"))
    for phase in ("detect", "start", "import", "build", "join", "first merge"):
        assert phase in recovered
