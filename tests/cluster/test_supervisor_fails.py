"""A supervisor that meets an error which nobody foresaw, at every start: the run ends, says why and leaves nothing."""

import psutil
import pytest
import ray

from actors.spec import SUPERVISOR
from below import gone
from tests.cluster.harness import LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(240)


def test_a_supervisor_that_always_fails_gives_up_and_ends_the_run(cluster, tmp_path):
    run = LiveRun(tmp_path / "run", ["learners=1", "supervisor.linger_s=60"])
    try:
        run.wait_training()
        actors = [psutil.Process(pid) for pid in run.pids()]
        tape = run.spec.work_dir / "events.jsonl"
        tape.rename(tmp_path / "events.jsonl")
        tape.mkdir()  # it reads the tape when it starts
        kill(run.call(SUPERVISOR, "pid"))
        status = wait_for("the run has ended", lambda: (s := run.status(SUPERVISOR)) and s.phase == "done" and s, 150.0)
        assert "IsADirectoryError" in status.error
        failures = sorted(path.name for path in (run.spec.work_dir / "failures").iterdir())
        assert len(failures) == run.config.supervisor.most_failures
        wait_for("its learners and services are gone", lambda: all(map(gone, actors)))
    finally:
        run.close()
    assert ray.is_initialized()
