"""One real local Ray for all tests of this folder, and runs on it that are ended with their test."""

import contextlib

import pytest
import ray

from tests.cluster.harness import LiveRun


@pytest.fixture(scope="package")
def cluster(tmp_path_factory):
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        namespace="tests",
        object_store_memory=200 * 1024 * 1024,
    )
    yield
    ray.shutdown()


@pytest.fixture
def start(cluster, tmp_path):
    """Starts a run with two learners in the test's own folder."""
    with contextlib.ExitStack() as stack:

        def begin(*overrides):
            run = LiveRun(tmp_path / "run", ["learners=2", *overrides])
            stack.callback(run.close)
            return run

        yield begin
