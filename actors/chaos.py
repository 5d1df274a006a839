"""Real faults: signals to processes of the run, sent from the node they live on."""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0, max_retries=0)
def _signal(pid: int, number: int) -> None:
    os.kill(pid, number)


def send_signal(node_id: str, pid: int, number: signal.Signals) -> Any:
    """Send a signal to a process on that node. Returns the reference of the task that does it."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return _signal.options(scheduling_strategy=strategy).remote(pid, int(number))
