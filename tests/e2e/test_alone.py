"""A run on a cluster that was started apart, whose driver is killed and never comes back."""

import json
import os
import signal
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from tests.cluster.audit import processes
from tests.cluster.harness import wait_for
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.timeout(400)


LEFT = """
import json
import app.train  # how a client of the project speaks to a cluster: with its token, if there is one
import ray
ray.init(log_to_driver=False, logging_level="error")
groups = ray.util.placement_group_table().values()
named = ray.util.list_named_actors(all_namespaces=True)
print(json.dumps([*named, *(group["name"] for group in groups if group["state"] != "REMOVED")]))
"""


def left_in(cluster):
    """Named actors and placement groups of a cluster, as another of its clients sees them."""
    env = {**os.environ, "RAY_ADDRESS": cluster}
    asked = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, cwd=ROOT, env=env)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_run_without_a_driver_reaches_its_budget_and_leaves(command, ray_head):
    budget = ("train.tokens=200000", "supervisor.linger_s=2")
    run = command(*budget, env={"RAY_ADDRESS": ray_head})
    run.wait_merges(4)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert not run.events("finish"), "too late to test this"
    assert processes("Learner")
    assert left_in(ray_head)

    wait_for("nothing of it is left", lambda: not processes(), 200.0)
    assert left_in(ray_head) == []
    summary = run.summary()
    assert summary["status"] == "completed"
    assert summary["tokens_processed"] >= 200000
    assert summary["work"]["outstanding"] == 0
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    assert model.num_parameters() == summary["work"]["parameters"]

    again = command(*budget, "run.resume=auto", env={"RAY_ADDRESS": ray_head})
    assert again.wait() == 0, again.output
    assert "completed already" in again.output
