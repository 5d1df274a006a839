"""One real local Ray for each module of tests."""

import pytest
import ray


@pytest.fixture(scope="module")
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
