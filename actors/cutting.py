"""A learner's part in consistent cuts, and how it goes on from one."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

from actors.boundary import Boundary
from actors.feed import Feed
from actors.spec import RunSpec
from app.diloco.messages import CutId
from app.diloco.replica import Replica
from app.diloco.replica_state import ReplicaState, state_of
from app.learning.inner import InnerLoop
from app.learning.moments import States, flat
from app.run.cuts import Cuts, Part, name_of
from app.run.record import RecordDamaged
from app.run.storage import open_store

_log = logging.getLogger(__name__)

MOMENTS = "moments/"
REPLICA = "replica/"
RNG = "rng"


class Cutting:
    """Copies the learner's state between two steps; a thread of its own writes the copy."""

    def __init__(self, spec: RunSpec, token: str, replica: Replica, loop: InnerLoop, feed: Feed, boundary: Boundary):
        """`token` is that of the hello by which the incarnation joined."""
        self._cuts = Cuts(open_store(spec.checkpoints))
        self._token, self._replica, self._loop, self._feed = token, replica, loop, feed
        self._boundary = boundary

    def want(self, id: CutId) -> None:
        """Wait until the training thread has copied its state for this cut, if it has not; in the link's thread."""
        if id > (self._replica.cut_taken or (0, 0)):
            self._boundary.run(lambda: self._copy(id))

    def _copy(self, id: CutId) -> None:
        replica = self._replica
        with replica.lock:
            state = state_of(replica)
            who = {"token": self._token, "incarnation": replica.sender.incarnation}
            replica.cut_taken = id
        meta = {"replica": state.meta, "feed": list(self._feed.position()), **who}
        tensors = {f"{REPLICA}{name}": tensor for name, tensor in state.tensors.items()}
        args = (id, meta, tensors | {RNG: self._loop.rng_states()}, self._loop.moments())
        threading.Thread(target=self._write, args=args, name="cut", daemon=True).start()

    def _write(self, id: CutId, meta: dict[str, Any], tensors: dict[str, torch.Tensor], moments: States) -> None:
        everything = tensors | {f"{MOMENTS}{name}": tensor for name, tensor in flat(moments).items()}
        try:
            self._cuts.write(name_of(id), self._replica.sender.learner, meta, everything)
        except OSError:
            _log.exception("its part of cut %s can't be written", name_of(id))
            return
        self._replica.cut_saved = id


@dataclass(frozen=True)
class Restored:
    """A learner's part of a cut."""

    token: str
    incarnation: int
    replica: ReplicaState
    moments: dict[str, torch.Tensor]
    rng: torch.Tensor
    """State of each worker's random generator, uint8 [W, bytes]."""
    feed: tuple[int, int]

    @classmethod
    def of(cls, part: Part) -> Restored:
        """What `Cutting` has saved. Raises KeyError when it is something else."""
        meta, tensors = part.meta, part.tensors
        replica = {n.removeprefix(REPLICA): t for n, t in tensors.items() if n.startswith(REPLICA)}
        moments = {n.removeprefix(MOMENTS): t for n, t in tensors.items() if n.startswith(MOMENTS)}
        request, used = meta["feed"]
        state = ReplicaState(meta["replica"], replica)
        return cls(meta["token"], meta["incarnation"], state, moments, tensors[RNG], (request, used))


def part_of(spec: RunSpec, learner: str) -> Restored | None:
    """This learner's part of the cut that the run goes on from, None when there is none."""
    if spec.cut is None:
        return None
    cuts = Cuts(open_store(spec.checkpoints))
    try:
        return Restored.of(cuts.part(spec.cut, learner)) if learner in cuts.learners(spec.cut) else None
    except (OSError, RecordDamaged, KeyError, TypeError, ValueError) as error:
        _log.warning("its part of cut %s can't be used: %s", spec.cut, error)
        return None
