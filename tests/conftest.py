"""What every test relies on: no usage statistics, no process left behind."""

import contextlib
import os
import time

import psutil
import pytest

from below import marked

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_SILENT"] = "true"
MARK = "DILOCO_TESTS"
os.environ[MARK] = str(os.getpid())
"""In the environment of everything that the tests start, whoever has become its parent."""

REAP_S = 15.0


@pytest.fixture(scope="session", autouse=True)
def _leaves_no_process_behind():
    """Processes that a test started must end with the session; what does not is ended here and fails the session."""
    yield
    deadline = time.monotonic() + REAP_S
    while (left := marked(MARK, str(os.getpid()))) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline()[:4]))
            process.kill()
    assert not names, f"left running: {names}"
