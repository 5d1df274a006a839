"""Following a job's log to its end, over lost connections too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, TextIO

from app.jobs.job import LIVING, JobError

QUIET_S = 60.0
"""A run writes a line every few seconds: after so many without any, the connection is taken for dead."""
LOST_S = 600.0
"""Seconds without an answer after which a cluster is not asked any more."""
AGAIN_S = 2.0


class Source(Protocol):
    """Where logs come from: a cluster."""

    def details(self, job_id: str) -> dict[str, Any]:
        """A job as Ray describes it. Raises JobError."""

    def tail(self, job_id: str) -> AsyncGenerator[str, None]:
        """The log from its start until the job has ended. Raises JobError."""


class Log:
    """The log of one job, and how much of it was shown."""

    def __init__(self, source: Source, job_id: str, out: TextIO, shown: int = 0):
        """`shown`: characters that are not to be shown again."""
        self._source, self._job_id, self._out = source, job_id, out
        self._shown = shown
        self._heard = time.monotonic()
        self._lost = False

    def follow(self) -> dict[str, Any]:
        """Show what comes until the job has ended. Returns what Ray says of it then.

        Raises JobError when nothing was heard of the cluster for `LOST_S`.
        """
        return asyncio.run(self._follow())

    async def _follow(self) -> dict[str, Any]:
        last = False
        while True:
            whole, details = False, None
            try:
                whole = await self._show()
            except JobError as error:
                self._away(error)
            try:
                details = self._source.details(self._job_id)
                self._well()
            except JobError as error:
                self._away(error)
            if details is not None and details["status"] not in LIVING:
                if whole or last:
                    return details
                last = True  # once more, for the rest of its log
            await asyncio.sleep(AGAIN_S)

    async def _show(self) -> bool:
        """What one connection brings, less what was shown. Returns whether it brought the log's end."""
        seen = 0
        async with aclosing(self._source.tail(self._job_id)) as pieces:
            while True:
                try:
                    piece = await asyncio.wait_for(anext(pieces), QUIET_S)
                except StopAsyncIteration:
                    return True
                except TimeoutError:
                    return False
                self._well()
                new = piece[max(0, self._shown - seen) :]
                seen += len(piece)
                self._shown = max(self._shown, seen)
                self._out.write(new)
                self._out.flush()

    def _away(self, error: JobError) -> None:
        if time.monotonic() - self._heard > LOST_S:
            raise error
        if not self._lost:
            print(f"the connection is lost, trying again: {error}", file=self._out, flush=True)
        self._lost = True

    def _well(self) -> None:
        self._heard, self._lost = time.monotonic(), False
