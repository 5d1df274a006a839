"""One event of the tape as a line of JSON."""

from __future__ import annotations

import json
import math
from typing import Any


def encoded(event: dict[str, Any]) -> bytes:
    """An event as a whole line. NaN and infinities become null. Raises TypeError: a field that JSON can't hold."""
    return (json.dumps(finite(event), allow_nan=False) + "\n").encode()


def parsed(lines: bytes) -> tuple[list[dict[str, Any]], int]:
    """The events of some lines, and the number of those that are torn."""
    events: list[dict[str, Any]] = []
    torn = 0
    for line in lines.splitlines():
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            torn += 1
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str) and _is_time(event.get("at")):
            events.append(event)
        else:
            torn += 1
    return events, torn


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finite(value: Any) -> Any:
    """The value with null for every NaN and infinity in it: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
