"""What a learner that comes back goes on with."""

import os
import signal

import pytest

from tests.cluster.harness import LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(240)
OFTEN = ("train.moments_every_steps=5",)


def recovered(run: LiveRun, learner: str, after: int) -> dict:
    """What its next process went on with."""

    def look() -> dict | None:
        found = [e for e in run.events("recovered") if e["learner"] == learner and e["incarnation"] > after]
        return found[0] if found else None

    return wait_for(f"{learner} has recovered", look)


def test_moments_come_from_the_learner_with_the_most_steps_or_the_next_when_it_dies_half_way(start):
    run = start("learners=3", *OFTEN)
    run.wait_training()
    assert run.events("recovered")[0]["source"] == "fresh"  # who joins later, when others are at work, asks these
    victim, others = run.learner("learner-1"), [run.learner(name) for name in ("learner-0", "learner-2")]
    wait_for("all have moments to give", lambda: all(run.try_call(o.learner, "moments") is not None for o in others))
    kill(victim.pid)
    assert recovered(run, "learner-1", victim.incarnation)["source"] in ("learner-0", "learner-2")

    first, second = sorted((run.learner(o.learner) for o in others), key=lambda status: -status.steps)
    victim = run.learner("learner-1")
    os.kill(first.pid, signal.SIGSTOP)  # it is asked, and does not get to answer
    kill(victim.pid)
    next_one = ("learner-1", victim.incarnation + 1)
    wait_for("it joins", lambda: next_one in [(e["learner"], e["incarnation"]) for e in run.events("join")])
    os.kill(first.pid, signal.SIGKILL)
    assert recovered(run, "learner-1", victim.incarnation)["source"] == second.learner
    run.wait_training()
    run.finish()


def test_moments_from_the_own_checkpoint_unless_it_is_damaged(start):
    run = start("train.recovery=checkpoint", "train.moments_every_s=0.2", *OFTEN)
    run.wait_training()
    path = run.spec.work_dir / "checkpoints" / "learners" / "learner-1.safetensors"
    wait_for("it is written", path.exists)
    victim = run.learner("learner-1")
    kill(victim.pid)
    assert recovered(run, "learner-1", victim.incarnation)["source"] == "checkpoint"
    victim = run.learner("learner-1")
    os.kill(victim.pid, signal.SIGSTOP)  # it writes no more
    path.write_bytes(path.read_bytes()[:100])
    os.kill(victim.pid, signal.SIGKILL)
    assert recovered(run, "learner-1", victim.incarnation)["source"] == "fresh"
    run.finish()
