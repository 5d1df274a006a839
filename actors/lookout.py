"""Asks every actor of a run how it is, without ever waiting for one that does not answer."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from actors.fleet import Fleet
from actors.learner import LearnerStatus
from actors.service import Service, Whereabouts
from actors.spec import EVALUATOR, LEDGER, RENDEZVOUS, SYNCER, RunSpec
from actors.syncer_status import SyncerStatus
from app.config import Config
from app.run.watch import Sight

ANSWER_S = 0.1
"""How long one look waits for answers."""
FORGET_S = 10.0
"""An answer that is this late is given up and asked for again."""


def lasting(config: Config) -> tuple[str, ...]:
    """The services without which there is no run, syncers aside. An evaluator is there only while somebody wants it."""
    return (LEDGER, RENDEZVOUS) if config.algo == "data_parallel" else (LEDGER,)


class Lookout:
    """The newest status of the services and of each learner."""

    def __init__(self, fleet: Fleet, spec: RunSpec):
        self._fleet = fleet
        self.wanted: set[str] = set()
        """Learners that were asked for."""
        self.unplaced: set[str] = set()
        """Those of them that have no place in the cluster."""
        self._syncers = spec.syncers
        self.services = {name: Service() for name in (*spec.syncers, *lasting(spec.config), EVALUATOR)}
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, tuple[Any, float]] = {}
        self.missing: set[str] = set(self.services)
        """Actors that are not there: nobody made them yet, or they ended for good."""
        self.errors: dict[str, str] = {}
        """Service → why it could not start or can't work, and never will: Ray restarts it from all but own errors."""
        self.learners: dict[str, LearnerStatus] = {}
        self.seen: dict[str, tuple[float, LearnerStatus]] = {}
        """When (Unix time) a learner answered last, and what; it stays when its process is gone."""
        self.silent: set[str] = set()
        self._gone: dict[str, str | None] = {}
        """Actors found gone by this look; with the error that ended them for good."""
        self.leader = SYNCER
        """Name of the syncer that leads, or did when one answered last."""
        self.syncer: SyncerStatus | None = None
        """Newest answer of the syncer that leads, also of a process that is gone; None before the first."""

    def well(self, name: str) -> bool:
        """Whether a service's present process answered at the last look."""
        return not self.services[name].starting and name not in self.silent

    @property
    def leads(self) -> bool:
        """Whether a syncer answered at the last look that it leads."""
        return self.well(self.leader) and self.services[self.leader].answer is self.syncer

    def restarting(self, name: str) -> None:
        """The process of a service is gone: the next one gets the time of a start."""
        self.services[name].restart()
        self._asked.pop(name, None)

    def forget(self, name: str) -> None:
        """A service was ended for good: the next look finds it missing, or another one of its name."""
        self.restarting(name)
        self._handles.pop(name, None)
        self.errors.pop(name, None)

    def drop(self, learner: str) -> None:
        """This learner is wanted no more: nobody looks for it."""
        self.wanted.discard(learner)
        self._asked.pop(learner, None)
        self._handles.pop(learner, None)
        self.learners.pop(learner, None)
        self.seen.pop(learner, None)
        self.missing.discard(learner)
        self.silent.discard(learner)

    def look(self, wait_s: float = ANSWER_S) -> None:
        """Ask everybody who has no question open, and take the answers that are there."""
        now = time.monotonic()
        for name in (*self.services, *sorted(self.wanted)):
            if name not in self._asked or now - self._asked[name][1] > FORGET_S:
                handle = self._handle(name)
                if handle is not None:
                    other = name in self.services and name not in self._syncers
                    ask = handle.where if other else handle.status
                    self._asked[name] = (ask.remote(), now)
        refs = [ref for ref, _ in self._asked.values()]
        done = set(ray.wait(refs, num_returns=len(refs), timeout=wait_s)[0]) if refs else set()
        self._gone.clear()
        for name, (ref, asked_at) in list(self._asked.items()):
            if ref in done:
                del self._asked[name]
                self._take(name, ref, asked_at)
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
            if name in self.services:
                self.services[name].restart()
        self.missing.discard(name)
        return self._handles[name]

    def _take(self, name: str, ref: Any, asked_at: float) -> None:
        try:
            status = ray.get(ref)
        except (ActorDiedError, ActorUnavailableError) as error:
            self.silent.add(name)
            self._gone[name] = str(error) if isinstance(error, ActorDiedError) else None
            self.learners.pop(name, None)  # its process id is nobody's now
            if name in self.services:
                self.services[name].gone()
            if isinstance(error, ActorDiedError):
                self._handles.pop(name, None)
                if name in self.services:
                    self.errors[name] = str(error)
            return
        except RayError:
            self.silent.add(name)
            return
        self.silent.discard(name)
        if name in self.services:
            self.services[name].answered(status, asked_at)
            if isinstance(status, SyncerStatus) and (self.syncer is None or status.epoch >= self.syncer.epoch):
                self.leader, self.syncer = name, status
            if isinstance(status, Whereabouts) and status.error is not None:
                self.errors[name] = status.error
        else:
            self.learners[name] = status
            self.seen[name] = (time.time(), status)

    def sights(self) -> dict[str, Sight]:
        """The learners as the watch wants them."""
        return {name: self._sight(name) for name in sorted(self.wanted)}

    def _sight(self, name: str) -> Sight:
        status = self.learners.get(name)
        if name in self._gone:
            return Sight(answered=False, gone=True, error=self._gone[name], placed=name not in self.unplaced)
        if name in self.unplaced:
            return Sight(answered=False, placed=False)
        if status is None or name in self.silent:
            return Sight(answered=False)
        return Sight(
            answered=True,
            incarnation=status.incarnation,
            steps=status.steps,
            step_time=status.step_time,
            resting=status.state in ("finished", "waiting", "leaving", "left"),
            error=status.error,
        )
