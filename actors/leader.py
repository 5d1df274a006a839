"""Which of a run's syncers leads: whoever wants something of it asks here. With a standby there are two to ask."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from actors.spec import SYNCER, RunSpec

ASK_S = 1.0
"""A syncer that has not answered after so long is not waited for."""
LOOK_S = 3.0
"""A poll that is not answered for so long may be with a syncer that has been replaced; a parked one is well within."""


class Follows(RuntimeError):
    """This syncer does not lead, and does nothing but follow: ask the other one."""


@dataclass(frozen=True)
class Standing:
    """What a syncer says of itself."""

    epoch: int
    """Under which it leads; 0 while it follows."""
    rising: bool = False
    """It follows no more and is about to lead."""


@dataclass(frozen=True)
class Leader:
    """The syncer that led when somebody asked."""

    handle: Any
    epoch: int = 0
    """Under which it leads; 0 where there is but one syncer, and nobody to confuse it with."""


def find_leader(spec: RunSpec) -> Leader:
    """The syncer that leads, by a fresh handle. Raises ValueError while there is none."""
    if not spec.config.syncer.standby:
        return Leader(ray.get_actor(SYNCER, namespace=spec.namespace))
    found = _newest(spec)
    if found is None:
        raise ValueError("no syncer leads now")
    return found


def _newest(spec: RunSpec) -> Leader | None:
    """Of those that say that they lead, the one of the latest epoch; None when nobody does."""
    asked = {}
    for name in spec.syncers:
        try:
            handle = ray.get_actor(name, namespace=spec.namespace)
        except (ValueError, RayError):
            continue
        asked[handle.standing.remote()] = handle
    leaders = []
    ends_at = time.monotonic() + ASK_S
    for ref, handle in asked.items():
        try:
            standing: Standing = ray.get(ref, timeout=max(0.0, ends_at - time.monotonic()))
        except (RayError, TimeoutError):
            continue
        if standing.epoch:
            leaders.append(Leader(handle, standing.epoch))
    return max(leaders, key=lambda leader: leader.epoch, default=None)


def reply_of(spec: RunSpec, leader: Leader, work: Any, timeout_s: float) -> Any:
    """The result of a call to a syncer.

    Raises TimeoutError after so long, or as soon as a later syncer leads; and what the call raises.
    """
    if not spec.config.syncer.standby:
        return ray.get(work, timeout=timeout_s)
    ends_at = time.monotonic() + timeout_s
    while not ray.wait([work], timeout=min(LOOK_S, max(0.0, ends_at - time.monotonic())))[0]:
        if time.monotonic() >= ends_at:
            raise TimeoutError("no answer")
        newest = _newest(spec)
        if newest is not None and newest.epoch > leader.epoch:
            raise TimeoutError("another syncer leads")
    return ray.get(work)
