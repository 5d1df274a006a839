"""When the faults of the `chaos` group strike: a pure schedule by global progress."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from app.config import Fault


def due_faults(faults: Sequence[Fault], struck: Collection[int], tokens: int, budget: int) -> list[int]:
    """Places in the list of the faults whose moment has come and that have not struck yet."""
    return [i for i, fault in enumerate(faults) if i not in struck and tokens >= fault.at * budget]


def struck_faults(events: Sequence[dict[str, Any]]) -> set[int]:
    """Faults of the schedule that the tape knows of: a restarted supervisor or a resumed run does not repeat them."""
    return {event["index"] for event in events if event["kind"] == "fault" and event.get("index") is not None}
