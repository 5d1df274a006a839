"""A worker of a learner beside its rank 0: an actor that rank 0's process owns, so that Ray ends it with that one.

It does what rank 0 says (`app/learning/follow.py`), and ends itself when nothing is said any more: rank 0 is gone, cut
off or frozen then, or it was frozen itself. A group never mends: its learner starts anew, with other ranks.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.learner import HANG_SIGNAL
from actors.service import Whereabouts, whereabouts
from app.learning.memory import keep_freed_memory

if TYPE_CHECKING:
    from actors.spec import RunSpec
    from app.learning.ranks import Place

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
OVERDUE = 2.0
"""A call gives up a rank that is late; whoever hangs elsewhere has this many times as long."""


def start_ranks(spec: RunSpec, learner: str) -> list[Any]:
    """Begin to start ranks 1 to W−1 of this process' learner, each in its bundle of the placement group."""
    pool = spec.config.pool_of(learner).settings
    group = ray.util.get_current_placement_group()
    return [
        ray.remote(Rank)
        .options(
            num_cpus=pool.cpus_per_worker,
            num_gpus=pool.gpus_per_worker,
            resources=dict(pool.resources_per_worker),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            max_restarts=0,
            max_concurrency=2,  # one call follows, another says where it is
            **spec.process,
        )
        .remote(spec, learner, rank)
        for rank in range(1, pool.workers_per_learner)
    ]


class Rank:
    """One rank of a learner's group."""

    def __init__(self, spec: RunSpec, learner: str, rank: int):
        faulthandler.register(HANG_SIGNAL, all_threads=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 gets it too: its learner hands in first
        keep_freed_memory()
        self._spec, self._learner, self._rank = spec, learner, rank
        self._until = math.inf
        """When (monotonic clock) rank 0 must have been heard of again."""

    def where(self) -> Whereabouts:
        """Node and process."""
        return whereabouts()

    def follow(self, store_host: str, store_port: int, vocab: int) -> None:
        """Be a rank of the group whose rank 0 serves that store, until it is over; ends the process when it breaks.

        `vocab`: tokens of the data. Other errors than those between ranks are raised.
        """
        import torch

        from app.learning.gradients import GroupBroken
        from app.learning.ranks import Place

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # what Ray sets aside for this worker
        workers = self._spec.config.pool_of(self._learner).settings.workers_per_learner
        place = Place(self._rank, workers, ray.util.get_node_ip_address(), store_host, store_port)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        try:
            self._follow(place, vocab)
        except GroupBroken as error:
            _log.warning("rank %s of %s leaves: %s", self._rank, self._learner, error)
            os._exit(1)
        self._until = math.inf

    def _follow(self, place: Place, vocab: int) -> None:
        from actors.crew import ranks_of
        from app.diloco.fragments import build_layout, specs_of
        from app.learning.follow import Follower
        from app.learning.model import build_model

        config, train = self._spec.config, self._spec.config.pool_of(self._learner).train
        model = build_model(config.model, vocab, config.data.seq_len, config.run.seed)
        layout = build_layout(specs_of(model), config.diloco.fragments)
        ranks = ranks_of(self._spec, self._learner, place)
        Follower(model, train, layout, ranks).follow(self._heard)

    def _heard(self, patience_s: float) -> None:
        self._until = time.monotonic() + OVERDUE * patience_s

    def _watch(self) -> None:
        while time.monotonic() < self._until:
            time.sleep(LOOK_EVERY_S)
        _log.warning("rank %s of %s has heard nothing for too long", self._rank, self._learner)
        os._exit(1)
