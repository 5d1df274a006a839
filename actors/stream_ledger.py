"""The data ledger of a stream: it reads ahead, and gives the rows with their leases."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from typing_extensions import override

from actors.ledger import LeaseKeeper
from actors.service import Whereabouts, whereabouts
from actors.spec import RunSpec
from app.config import ConfigError
from app.learning.leases import Lease
from app.learning.stream import Stream
from app.learning.tokenizer import TokenIds

_log = logging.getLogger(__name__)

STREAM_CALLS = 8
"""Calls at a time: rows that must be read again hold up nobody else."""
READ_AHEAD = 4
"""Blocks that are kept ready."""
RETRY_S = 1.0


class StreamLedger(LeaseKeeper):
    """Leases blocks of a stream; a restart reads again what it must."""

    def __init__(self, spec: RunSpec):
        super().__init__(spec.checkpoints)
        config = spec.config.data
        state = None if self._found is None else self._found["stream"]
        self._stream = Stream(config, spec.fetch_data(), spec.config.run.seed, state)
        self._open(self._stream)
        self._patience_s = config.stream_patience_s
        self._error: str | None = None
        self._taken = threading.Event()
        threading.Thread(target=self._read_ahead, name="read ahead", daemon=True).start()

    @override
    def where(self) -> Whereabouts:
        return whereabouts(self._error)

    @override
    def lease(self, learner: str, incarnation: int, request: int) -> Lease | None:
        lease = super().lease(learner, incarnation, request)
        self._taken.set()
        return lease

    def rows(self, epoch: int, block: int) -> TokenIds:
        """All rows [n, S] of a block that is leased. Raises KeyError when it is not, and what reading raises."""
        return self._stream.rows(epoch, block)

    @override
    def _state(self) -> dict[str, Any]:
        self._stream.keep(self._book.outstanding)
        return {**super()._state(), "stream": self._stream.state()}

    def _read_ahead(self) -> None:
        away_since: float | None = None
        while self._error is None:
            self._taken.clear()
            if self._stream.ahead >= READ_AHEAD:
                self._taken.wait()
                continue
            try:
                self._stream.read()
                away_since = None
            except ConfigError as error:
                self._error = str(error)
            except Exception as error:  # whatever a network makes of it
                away_since = away_since or time.monotonic()
                _log.warning("the stream's source is away: %s", error)
                if time.monotonic() - away_since > self._patience_s:
                    self._error = f"the stream can't be read: {type(error).__name__}: {error}"
                time.sleep(RETRY_S)
