"""A run's attempts: each start of it, with the pauses in between, in which nobody wanted it to get on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Event = dict[str, Any]


def attempts(events: Sequence[Event]) -> list[Sequence[Event]]:
    """The events of each attempt. One begins with `run_started`, or with the start of the syncer that wrote it."""
    starts = []
    for i, event in enumerate(events):
        if event["kind"] == "run_started":
            own_syncer = i > 0 and events[i - 1]["kind"] == "syncer_started"
            starts.append(i - 1 if own_syncer else i)
    bounds = sorted({0, *starts, len(events)})
    return [events[start:end] for start, end in pairwise(bounds)]


def without_pauses(events: Sequence[Event]) -> list[Event]:
    """The same events as if each attempt had begun when the one before ended: a night off is no gap between merges."""
    moved: list[Event] = []
    pause, ended = 0.0, None
    for attempt in attempts(events):
        if ended is not None:
            pause += max(0.0, attempt[0]["at"] - ended)
        ended = attempt[-1]["at"]
        moved += [_earlier(event, pause) for event in attempt]
    return moved


def _earlier(event: Event, seconds: float) -> Event:
    moved: Event = {key: event[key] - seconds for key in ("at", "struck_at", "ends_at", "silent_since") if key in event}
    if "timeline" in event:
        moved["timeline"] = {phase: at - seconds for phase, at in event["timeline"].items()}
    return {**event, **moved}
