"""How a learner comes into the run: anew, or as it was when a consistent cut was made."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from actors.cutting import Restored, part_of
from actors.link import join
from actors.spec import RunSpec
from app.diloco.fragments import Layout
from app.diloco.messages import Hello, Welcome
from app.diloco.replica import Replica
from app.diloco.replica_state import restored
from app.diloco.weights import Weights


@dataclass(frozen=True)
class Entry:
    """A learner that has joined."""

    token: str
    """Of the hello by which it joined."""
    welcome: Welcome
    replica: Replica
    part: Restored | None
    """Its part of the cut that it goes on from; None of one that begins anew."""


def enter(spec: RunSpec, hello: Hello, layout: Layout, weights: Weights, stop: threading.Event) -> Entry | None:
    """Join, and write what the learner begins with into `weights`; None when told to stop. Raises Denied.

    In a run that went back to a cut, the hello that its part was saved under gets the incarnation of then again: its
    counters, its outstanding work and its leases go on. A process that comes after that one begins anew.
    """
    part = part_of(spec, hello.learner) if spec.rolled_back else None
    settings = spec.config.diloco
    if part is not None:
        welcome = join(spec, replace(hello, token=part.token), stop)
        if welcome is None:
            return None
        if welcome.sender.incarnation == part.incarnation and welcome.seq <= part.replica.meta["seq"]:
            return Entry(part.token, welcome, restored(layout, settings, weights, welcome, part.replica), part)
        if welcome.seq < 0:  # a new incarnation
            return Entry(part.token, welcome, Replica(layout, settings, weights, welcome), None)
    welcome = join(spec, hello, stop)
    if welcome is None:
        return None
    replica = Replica(layout, settings, weights, welcome)
    return Entry(hello.token, welcome, replica, None)
