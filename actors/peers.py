"""The other learners, as one learner of a data-parallel run has them.

The training thread makes all calls but one: rank 0 of an elastic group asks now and then whether somebody waits. A
group that breaks is left; the learner then waits at the rendezvous until a new one forms, and takes over the state of
the member whose weights have seen the most steps.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError
from torch import Tensor, distributed

from actors.spec import RENDEZVOUS, RunSpec
from app.diloco.clock import hang_deadline
from app.learning.gathering import Formation, Guest
from app.learning.gradients import Group, GroupBroken, Part, Signs, flat_buffer, mean_gradients
from app.learning.inner import InnerLoop

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.2
ASK_EVERY_S = 0.5


class Peers:
    """The group of all learners, from the view of one; formed or on the way to it."""

    def __init__(
        self,
        spec: RunSpec,
        name: tuple[str, int],
        loop: InnerLoop,
        parameter_lock: AbstractContextManager[Any],
        step_time: Callable[[], float],
        finish: threading.Event,
    ):
        """`name`: learner and incarnation. `step_time`: seconds, 0 while unknown. `finish`: told to stop stepping."""
        self._spec, self._name, self._loop, self._lock = spec, name, loop, parameter_lock
        self._step_time, self._finish = step_time, finish
        self._host = ray.util.get_node_ip_address()
        patience = timedelta(seconds=spec.config.diloco.hang_min_s)
        self._store = distributed.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=patience)
        self._buffer = flat_buffer(loop.parameters)
        self._group: Group | None = None
        self._visit = uuid.uuid4().hex
        self._sharing_since: float | None = None
        self._signs = Signs()
        """What the members told each other in the last step."""
        self._generation: str | None = None
        """The group of which this is rank 0."""
        self._wanted = threading.Event()
        """Somebody waits at the rendezvous."""
        if spec.config.train.elastic:
            threading.Thread(target=self._ask_now_and_then, name="rendezvous", daemon=True).start()
        self.steps = 0
        """Optimizer steps that the weights have seen, whoever made them."""
        self.shared_s = 0.0
        """Seconds that the last step waited for the others."""

    @property
    def formed(self) -> bool:
        """Whether the next step can be shared."""
        return self._group is not None

    @property
    def sharing_s(self) -> float:
        """Seconds for which the step under way has waited for the others by now; read by any thread."""
        since = self._sharing_since
        return 0.0 if since is None else time.monotonic() - since

    def meet(self) -> None:
        """Wait at the rendezvous for a moment; form the group when all are there."""
        place = self._arrive()
        if place is None:
            return
        config = self._spec.config
        try:
            self._group = Group(place, self._host, self._loop.device, config.diloco.hang_min_s)
            own = {"steps": self.steps} | self._loop.state()
            state = self._group.spread(own, config.supervisor.start_deadline_s)
        except GroupBroken as error:
            self.leave(str(error))
            return
        self._generation = place.generation if place.rank == 0 else None
        if place.rank != place.source:
            self.steps = state.pop("steps")
            self._loop.load_state(state, self._lock)

    def share(self, parameters: Sequence[Tensor], own: Part) -> Part:
        """Make the gradients the mean over all (`ShareGradients`). Raises GroupBroken; the group is left then."""
        self._sharing_since = started = time.monotonic()
        try:
            signs = Signs(self._finish.is_set(), self._wanted.is_set())
            whole, self._signs = mean_gradients(parameters, own, signs, self._buffer, self._add_up)
            return whole
        except GroupBroken as error:
            self.leave(str(error))
            raise
        finally:
            self._sharing_since = None
            self.shared_s = time.monotonic() - started

    def stepped(self, skipped: bool) -> None:
        """The step that was shared is made. When any of all was told to finish, all leave and finish."""
        self.steps += not skipped
        if self._signs.leaving:
            self._finish.set()
            self.leave("finished")
        elif self._signs.meeting:
            self.leave("somebody has come")

    def leave(self, why: str) -> None:
        """Leave the group, so that nobody waits for this learner in it."""
        _log.info("left the group: %s", why)
        self._visit, self._signs = uuid.uuid4().hex, Signs()
        self._generation = None
        self._wanted.clear()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _add_up(self, tensor: Tensor) -> None:
        assert self._group is not None  # the caller looked
        self._group.add_up(tensor, self._patience_s())

    def _patience_s(self) -> float:
        """For how long the others may be late: as long as a learner may be silent."""
        diloco, step_time = self._spec.config.diloco, self._step_time()
        if step_time == 0:
            return self._spec.config.supervisor.start_deadline_s
        return hang_deadline(step_time, diloco.hang_min_s, diloco.hang_steps, stretch=1.0)

    def _ask_now_and_then(self) -> None:
        while not self._finish.wait(ASK_EVERY_S):
            generation = self._generation
            if generation is None:
                continue
            try:
                rendezvous = ray.get_actor(RENDEZVOUS, namespace=self._spec.namespace)
                if ray.get(rendezvous.wanted.remote(generation), timeout=CALL_TIMEOUT_S):
                    self._wanted.set()
            except (ValueError, RayError, TimeoutError) as error:
                _log.info("rendezvous away: %s", error)

    def _arrive(self) -> Formation | None:
        guest = Guest(*self._name, self._visit, self._host, self._store.port, self.steps)
        try:
            rendezvous = ray.get_actor(RENDEZVOUS, namespace=self._spec.namespace)
        except (ValueError, RayError) as error:
            _log.info("no rendezvous yet: %s", error)
            time.sleep(RETRY_S)
            return None
        try:
            place: Formation | None = ray.get(rendezvous.arrive.remote(guest), timeout=CALL_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            _log.info("rendezvous away: %s", error)
            time.sleep(RETRY_S)
            return None
        return place
