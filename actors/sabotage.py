"""What a learner does to its own messages while a fault of the `chaos` group lasts: loses them, or spoils them."""

from __future__ import annotations

import time
from dataclasses import replace

from app.diloco.codec import payload_digest
from app.diloco.messages import Contribution, Payload

FOREIGN_VERSION = 1_000_000


class Sabotage:
    """Any thread may order it, one asks."""

    def __init__(self) -> None:
        self._muted_until = 0.0
        self._how, self._corrupt_until = "", 0.0
        self._earlier: Contribution | None = None

    def mute(self, seconds: float) -> None:
        """Lose everything that is sent or comes for so long."""
        self._muted_until = time.monotonic() + seconds

    def corrupt(self, how: str, seconds: float) -> None:
        """Spoil every contribution for so long, in one of the ways of `spoilt`."""
        self._how, self._corrupt_until = how, time.monotonic() + seconds

    @property
    def muted(self) -> bool:
        """Whether messages are lost now."""
        return time.monotonic() < self._muted_until

    def passed(self, given: Contribution) -> Contribution:
        """The contribution as it leaves."""
        earlier = self._earlier = self._earlier or given
        return spoilt(given, self._how, earlier) if time.monotonic() < self._corrupt_until else given


def spoilt(given: Contribution, how: str, earlier: Contribution) -> Contribution:
    """A contribution with a bit `flip`ped, all `nan`, the wrong `shape` or `version`, or `earlier` again (`replay`).

    `ahead`: on a base that its learner has not received.
    """
    payload = given.payload.copy()
    match how:
        case "flip":
            payload[len(payload) // 2] ^= 1
            return replace(given, payload=payload)
        case "nan":  # all bits set: NaN in fp32 and bf16, and so in the scales of blocks
            payload[:] = 0xFF
            return _sealed(given, payload)
        case "shape":
            return _sealed(given, payload[:-1])
        case "version":
            return replace(given, base_version=given.base_version + FOREIGN_VERSION)
        case "ahead":  # plausible: others may well have it
            return replace(given, base_version=given.report.held[given.fragment] + 1)
        case "replay":
            return earlier
    raise ValueError(how)


def _sealed(given: Contribution, payload: Payload) -> Contribution:
    return replace(given, payload=payload, digest=payload_digest(payload))
