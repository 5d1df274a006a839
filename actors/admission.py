"""Hellos that wait for the syncer's answer, by the token of their process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.diloco.messages import Welcome


class Denied(RuntimeError):
    """The syncer refused a hello; the message says why."""


class TryAgain(Denied):
    """The syncer can't admit anybody now; the same hello may be sent again."""


class Admission:
    """One question for each token, however often it is asked."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[Welcome]] = {}

    async def ask(self, token: str, put: Callable[[], None]) -> Welcome:
        """The answer to the hello with this token; `put` asks for it. Raises Denied."""
        future = self._open.get(token)
        if future is None or future.done():
            future = self._open[token] = asyncio.get_running_loop().create_future()
            put()
        try:
            return await asyncio.shield(future)
        finally:
            self._open.pop(token, None)

    def grant(self, token: str, welcome: Welcome) -> None:
        """It is in."""
        if future := self._waiting(token):
            future.set_result(welcome)

    def deny(self, token: str, why: str, again: bool) -> None:
        """It is not; `again`: it may ask once more."""
        if future := self._waiting(token):
            future.set_exception(TryAgain(why) if again else Denied(why))

    def _waiting(self, token: str) -> asyncio.Future[Welcome] | None:
        future = self._open.get(token)
        return None if future is None or future.done() else future
