"""Asks every actor of a run how it is, without ever waiting for one that does not answer."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from actors.fleet import Fleet
from actors.learner import LearnerStatus
from actors.spec import LEDGER, SYNCER, RunSpec
from actors.syncer_status import SyncerStatus
from app.run.watch import Sight

ANSWER_S = 0.1
"""How long one look waits for answers."""
FORGET_S = 10.0
"""An answer that is this late is given up and asked for again."""


class Lookout:
    """The newest status of the syncer and of each learner."""

    def __init__(self, fleet: Fleet, spec: RunSpec):
        self._fleet = fleet
        self._learner_ids = spec.config.learner_ids
        self._names = (SYNCER, LEDGER, *spec.config.learner_ids)
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, tuple[Any, float]] = {}
        self.missing: set[str] = set(self._names)
        """Actors that are not there: nobody made them yet, or they ended for good."""
        self.syncer: SyncerStatus | None = None
        self.service_error: str | None = None
        """Why syncer or ledger could not start, and never will."""
        self.learners: dict[str, LearnerStatus] = {}
        self.silent: set[str] = set()
        self._gone: dict[str, str | None] = {}
        """Actors found gone by this look; with the error that ended them for good."""
        self._heard_syncer = time.monotonic()
        self._syncer_starting = True
        self.lost_syncer: SyncerStatus | None = None
        """The last word of a syncer whose process was found to be gone; the supervisor takes note of it."""
        self.ledger: tuple[str, int] | None = None
        """Node and process of the ledger; None before it has answered."""
        self._heard_ledger = time.monotonic()

    @property
    def syncer_silent_s(self) -> float:
        """Seconds since the syncer answered, or since it was found to be gone."""
        return time.monotonic() - self._heard_syncer

    @property
    def syncer_starting(self) -> bool:
        """Whether the syncer's process has not answered yet."""
        return self._syncer_starting

    @property
    def ledger_silent_s(self) -> float:
        """Seconds since the ledger answered, or since it was found to be gone."""
        return time.monotonic() - self._heard_ledger

    def restarting_ledger(self) -> None:
        """The ledger's process is gone: the next one gets the time of a start."""
        self.ledger, self._heard_ledger = None, time.monotonic()
        self._asked.pop(LEDGER, None)

    def restarting_syncer(self) -> None:
        """The syncer's process is gone: the next one gets the time of a start."""
        self._syncer_starting, self._heard_syncer = True, time.monotonic()
        self._asked.pop(SYNCER, None)

    def look(self, wait_s: float = ANSWER_S) -> None:
        """Ask everybody who has no question open, and take the answers that are there."""
        now = time.monotonic()
        for name in self._names:
            if name not in self._asked or now - self._asked[name][1] > FORGET_S:
                handle = self._handle(name)
                if handle is not None:
                    ask = handle.where if name == LEDGER else handle.status
                    self._asked[name] = (ask.remote(), now)
        refs = [ref for ref, _ in self._asked.values()]
        done = set(ray.wait(refs, num_returns=len(refs), timeout=wait_s)[0]) if refs else set()
        self._gone.clear()
        for name, (ref, _) in list(self._asked.items()):
            if ref in done:
                del self._asked[name]
                self._take(name, ref)
            else:
                self.silent.add(name)

    def _handle(self, name: str) -> Any | None:
        """The actor's handle, asked of Ray once."""
        if name not in self._handles:
            found = self._fleet.find(name)
            if found is None:
                self.missing.add(name)
                return None
            self._handles[name] = found
        self.missing.discard(name)
        return self._handles[name]

    def _take(self, name: str, ref: Any) -> None:
        try:
            status = ray.get(ref)
        except (ActorDiedError, ActorUnavailableError) as error:
            self.silent.add(name)
            self._gone[name] = str(error) if isinstance(error, ActorDiedError) else None
            self.learners.pop(name, None)  # its process id is nobody's now
            if name == SYNCER and not self._syncer_starting:
                self.lost_syncer = self.syncer
                self.restarting_syncer()
            if name == LEDGER and self.ledger is not None:
                self.restarting_ledger()
            if isinstance(error, ActorDiedError):
                self._handles.pop(name, None)
                if name in (SYNCER, LEDGER):  # Ray restarts them from all but an error of their own
                    self.service_error = str(error)
            return
        except RayError:
            self.silent.add(name)
            return
        self.silent.discard(name)
        if isinstance(status, SyncerStatus):
            self.syncer, self._heard_syncer, self._syncer_starting = status, time.monotonic(), False
        elif isinstance(status, LearnerStatus):
            self.learners[name] = status
        elif name == LEDGER:
            self.ledger, self._heard_ledger = status, time.monotonic()

    def sights(self) -> dict[str, Sight]:
        """The learners as the watch wants them."""
        return {name: self._sight(name) for name in self._learner_ids}

    def _sight(self, name: str) -> Sight:
        status = self.learners.get(name)
        if name in self._gone:
            return Sight(answered=False, gone=True, error=self._gone[name])
        if status is None or name in self.silent:
            return Sight(answered=False)
        return Sight(
            answered=True,
            incarnation=status.incarnation,
            steps=status.steps,
            step_time=status.step_time,
            resting=status.state in ("finished", "waiting"),
            error=status.error,
        )
