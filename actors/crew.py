"""The other ranks of a learner, as its rank 0 has them: made, watched and lost together.

They are actors of rank 0's process, in the bundles of the learner's placement group that follow its own. When one of
them dies, or can't be reached in time, rank 0 ends its process: Ray starts it again, and that one makes new ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import distributed

from actors.service import Whereabouts
from actors.spec import RunSpec
from app.config import TrainConfig
from app.diloco.weights import NamedTensors, Weights
from app.learning.inner import InnerLoop
from app.learning.lead import GroupWeights, LeadLoop
from app.learning.ranks import Place, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

WHY_S = 1.0
"""A rank that failed says so within this time after its group broke."""


class Crew:
    """Ranks 1 to W−1."""

    def __init__(self, spec: RunSpec, learner: str, ranks: Sequence[Any], failed: Callable[[str], None]):
        """`ranks`: what `start_ranks` gave. `failed` is told the error of one that fails by itself."""
        self._spec, self._learner, self._actors, self._tell_failed = spec, learner, ranks, failed
        self._failed = threading.Event()
        self.places: tuple[Whereabouts, ...] = ()
        """Where they are, once they are up."""

    def call(self, vocab: int) -> None:
        """Have them build what they need, and come to the store that is served here. `vocab`: tokens of the data."""
        timeout = timedelta(seconds=self._spec.config.supervisor.start_deadline_s)
        self._host = ray.util.get_node_ip_address()
        self._store = distributed.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        work = [actor.follow.remote(self._host, self._store.port, vocab) for actor in self._actors]
        threading.Thread(target=self._watch, args=(work,), name="crew", daemon=True).start()

    def meet(self) -> Ranks:
        """The group, when all are there. Raises GroupBroken when they do not come in time."""
        return ranks_of(
            self._spec, self._learner, Place(0, len(self._actors) + 1, self._host, self._host, self._store.port)
        )

    def broken(self, why: str) -> None:
        """Can't go on with them: end this process, unless one of them has failed by itself, and says why."""
        if self._failed.wait(WHY_S):
            return
        _log.warning("the group of %s starts anew: %s", self._learner, why)
        self._end()

    def _watch(self, work: list[Any]) -> None:
        try:
            self.places = tuple(ray.get([actor.where.remote() for actor in self._actors]))
            while work:
                done, work = ray.wait(work)
                ray.get(done)
        except RayTaskError as error:
            self._tell_failed(str(error))
            self._failed.set()
        except RayError as error:
            _log.warning("a rank of %s is gone: %s", self._learner, error)
            self._end()

    def _end(self) -> None:
        """End this process; ranks beside it that are stopped hear nothing of that, and would hold their places."""
        here = ray.get_runtime_context().get_node_id()
        for place in self.places:
            if place.node_id == here:
                with suppress(OSError):
                    os.kill(place.pid, signal.SIGKILL)
        os._exit(1)


def assembled(
    model: PreTrainedModel, config: TrainConfig, crew: Crew | None, patience_s: Callable[[], float]
) -> tuple[InnerLoop, Weights]:
    """What steps, and what is trained by it: alone, or with a crew that was called, once all are there.

    `patience_s`: for how long ranks may now be late. Raises GroupBroken.
    """
    if crew is None:
        alone = InnerLoop(model, config)
        return alone, NamedTensors(_trained(model))
    ranks = crew.meet()
    loop = LeadLoop(model, config, ranks, patience_s)
    return loop, GroupWeights(loop, _trained(model), ranks)


def _trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def ranks_of(spec: RunSpec, learner: str, place: Place) -> Ranks:
    """This process' place in its learner's group, once all are there. Raises GroupBroken."""
    pool = spec.config.pool_of(learner).settings
    cuda = pool.gpus_per_worker > 0 and torch.cuda.is_available()
    return Ranks(place, pool.sharded, cuda, spec.config.supervisor.start_deadline_s)
