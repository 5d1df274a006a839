"""Where a learner that joins a run under way gets its optimizer state from, and where it leaves its own for others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import ray
from ray.exceptions import RayError
from safetensors.torch import save

from actors.cutting import Restored
from actors.entering import Entry
from actors.spec import RunSpec
from app.diloco.messages import Payload, Welcome
from app.learning.inner import InnerLoop
from app.learning.moments import States, packed, rebuilt
from app.run.cuts import Cuts
from app.run.record import RecordDamaged
from app.run.storage import open_store

_log = logging.getLogger(__name__)

FRESH = "fresh"
CHECKPOINT = "checkpoint"
CUT = "cut"
Source = Callable[[], Payload | bytes | None]
DONATE_S = 10.0
"""A donor that has not answered after this long is not waited for."""


def restore(spec: RunSpec, learner: str, entry: Entry, loop: InnerLoop) -> str:
    """Give a loop what its learner had at the cut that the run went back to, or else what `recover` finds.

    Returns where it came from, as `recover` does.
    """
    if entry.part is None:
        return recover(spec, learner, entry.welcome, loop)
    loop.load_optimizer_state(rebuilt(entry.part.moments, loop.optimizers))
    loop.load_rng_states(entry.part.rng)
    return CUT


def recover(spec: RunSpec, learner: str, welcome: Welcome, loop: InnerLoop) -> str:
    """Give a loop the optimizer state that `train.recovery` says, or else that of the cut the run was resumed with.

    Returns the donor's name, `checkpoint`, `cut` or `fresh`.
    """
    if welcome.tokens_processed == 0 or not _travels(spec):  # the run has just begun
        return FRESH
    for source, get in _sources(spec, learner, welcome):
        try:
            data = get()
            if data is not None:
                loop.take_moments(bytes(data))
                return source
        except (RayError, ValueError, OSError, TimeoutError, RecordDamaged, KeyError) as error:
            _log.warning("no optimizer state from %s: %s", source, error)
    return FRESH


def _travels(spec: RunSpec) -> bool:
    """Whether anybody may ask for a copy of optimizer state. A group that shares gradients hands it round itself."""
    return spec.config.train.recovery != FRESH and spec.config.algo != "data_parallel"


def _sources(spec: RunSpec, learner: str, welcome: Welcome) -> Iterator[tuple[str, Source]]:
    match spec.config.train.recovery:
        case "peer":
            for donor in welcome.donors:
                yield donor, partial(_donated, spec, donor)
        case "checkpoint":
            yield CHECKPOINT, partial(open_store(spec.checkpoints).read, _name(learner))
    if spec.cut is not None:
        cuts = Cuts(open_store(spec.checkpoints))
        for part in (learner, *spec.config.learner_ids):  # its own comes first
            yield CUT, partial(_of_cut, cuts, spec.cut, part)


def _donated(spec: RunSpec, donor: str) -> Payload | None:
    handle = ray.get_actor(donor, namespace=spec.namespace)
    given: Payload | None = ray.get(handle.moments.remote(), timeout=DONATE_S)
    return given


def _of_cut(cuts: Cuts, cut: str, learner: str) -> bytes:
    return save(Restored.of(cuts.part(cut, learner)).moments)


def _name(learner: str) -> str:
    return f"learners/{learner}.safetensors"


class Kept:
    """The newest copy of this learner's own optimizer state; training leaves it here and waits for nobody."""

    def __init__(self, spec: RunSpec, learner: str, stop: threading.Event):
        self._spec, self._learner, self._stop = spec, learner, stop
        self._states: States | None = None
        self._gather: Callable[[], States | None] | None = None
        self._steps = 0
        self._travels = _travels(spec)
        self._gathering = threading.Lock()
        if self._travels and spec.config.train.recovery == CHECKPOINT:
            threading.Thread(target=self._write_now_and_then, name="moments", daemon=True).start()

    def gathered(self, gather: Callable[[], States | None]) -> None:
        """Have `gather` fetch a copy when somebody asks: of a sharded group none is kept, as it takes all ranks."""
        self._gather = gather

    def stepped(self, steps: int, loop: InnerLoop) -> None:
        """After an inner step: time for another copy?"""
        self._steps = steps
        if self._travels and self._gather is None and steps % self._spec.config.train.moments_every_steps == 0:
            self._states = loop.moments()

    def packed(self) -> Payload | None:
        """As it travels, uint8 [bytes]; None before there is one."""
        gather = self._gather if self._steps > 0 else None
        if gather is not None and self._gathering.acquire(blocking=False):  # else that of a moment ago will do
            try:
                self._states = gather() or self._states
            finally:
                self._gathering.release()
        states = self._states
        return None if states is None else np.frombuffer(packed(states), np.uint8)

    def _write_now_and_then(self) -> None:
        store = open_store(self._spec.checkpoints)
        while not self._stop.wait(self._spec.config.train.moments_every_s):
            data = self.packed()
            try:
                if data is not None:
                    store.write(_name(self._learner), data.tobytes())
            except OSError:
                _log.exception("the optimizer state can't be written")
