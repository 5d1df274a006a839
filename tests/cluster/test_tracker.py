"""A tracker that can't be used costs its figures, never the run."""

import pytest

from tests.cluster.harness import LiveRun, wait_for

pytestmark = pytest.mark.timeout(240)


def test_a_tracker_that_can_not_start_is_left_out(cluster, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = LiveRun(tmp_path / "run", ["learners=1", "tracking=wandb", "tracking.mode=online"])
    try:
        run.wait_training()
        wait_for("the tape tells it", lambda: run.events("tracking_failed"))
        assert run.finish()["status"] == "stopped"
    finally:
        run.close()
