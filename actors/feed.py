"""A learner's data: blocks leased ahead from the ledger, cut into batches in the order of their leases.

Prepared data lies beside the learner, memory-mapped; the rows of a stream come from the ledger with their lease.

The ledger may die and come back; the learner steps on with what it has leased. It says nothing of its progress to the
ledger: what became of its samples follows from what the syncer merges.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayError

from actors.spec import LEDGER, RunSpec
from app.learning.blocks import Permutation
from app.learning.data import PreparedData
from app.learning.leases import Lease, StaleIncarnation

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
ROWS_TIMEOUT_S = 60.0
"""A stream's rows may have to be read again."""
RETRY_S = 0.2
WAIT_S = 0.2


@dataclass
class _Block:
    """A leased block and how far it is used up."""

    rows: npt.NDArray[Any]
    """Where its rows are in the prepared data, int64 [n]; of a stream the rows themselves, token ids [n, S]."""
    request: int
    """Of its lease: they are numbered from 0."""
    used: int = 0

    def take(self, count: int) -> npt.NDArray[Any]:
        taken = self.rows[self.used : self.used + count]
        self.used += len(taken)
        return taken


class Feed:
    """Gives the micro-batches of one inner step after the other; a thread of its own leases ahead."""

    def __init__(
        self,
        spec: RunSpec,
        learner: str,
        incarnation: int,
        data: PreparedData,
        guarded: Callable[[Callable[[], None]], Callable[[], None]],
        position: tuple[int, int] = (0, 0),
    ):
        """`guarded` wraps a thread's body so that its failure is the learner's. `position`: where to go on."""
        self._spec, self._learner, self._incarnation, self._data = spec, learner, incarnation, data
        config = spec.config.data
        pool = spec.config.pool_of(learner)
        self._train, self._workers = pool.train, pool.settings.workers_per_learner
        self._permutation = Permutation(spec.config.run.seed, len(data.train), config.block_samples)
        self._ahead: queue.Queue[_Block] = queue.Queue(maxsize=config.leases_ahead)
        self._blocks: deque[_Block] = deque()
        self._following, self._skip = position
        """Request of the block that is opened next, and how many of its samples are not taken again."""
        self._first_request = self._following
        self._stop = threading.Event()
        self._thread = threading.Thread(target=guarded(self._lease_ahead), name="feed", daemon=True)

    def start(self) -> None:
        """Start leasing."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end."""
        self._stop.set()

    def next(self, stop: threading.Event) -> list[torch.Tensor] | None:
        """The micro-batches of one inner step of all workers, each int64 [B, S].

        None when told to stop or no data came in time.
        """
        train = self._train
        wanted = train.batch_size * train.accumulation * self._workers
        while self._left() < wanted:
            if stop.is_set() or not self._open_block():
                return None
        taken = self._take(wanted)
        streaming = self._spec.config.data.streaming
        rows = torch.from_numpy(taken.astype(np.int64)) if streaming else self._data.train.take(taken)
        return list(rows.split(train.batch_size))

    def position(self) -> tuple[int, int]:
        """The request of the block that the next sample comes from, and how many of its samples were taken."""
        if self._blocks:
            return self._blocks[0].request, self._blocks[0].used
        return self._following, self._skip

    def _left(self) -> int:
        return sum(len(block.rows) - block.used for block in self._blocks)

    def _open_block(self) -> bool:
        try:
            block = self._ahead.get(timeout=WAIT_S)
        except queue.Empty:
            return False
        block.used, self._skip, self._following = self._skip, 0, block.request + 1
        self._blocks.append(block)
        return True

    def _take(self, wanted: int) -> npt.NDArray[Any]:
        taken: list[npt.NDArray[Any]] = []
        while wanted > 0:
            block = self._blocks[0]
            taken.append(block.take(wanted))
            wanted -= len(taken[-1])
            if block.used == len(block.rows):
                self._blocks.popleft()
        return np.concatenate(taken)

    def _lease_ahead(self) -> None:
        request = self._first_request
        while not self._stop.is_set():
            block = self._lease(request)
            if block is None:
                self._stop.wait(RETRY_S)
                continue
            request += 1
            while not self._stop.is_set():
                try:
                    self._ahead.put(block, timeout=WAIT_S)
                    break
                except queue.Full:
                    continue

    def _lease(self, request: int) -> _Block | None:
        try:
            ledger: Any = ray.get_actor(LEDGER, namespace=self._spec.namespace)
            call = ledger.lease.remote(self._learner, self._incarnation, request)
            lease: Lease | None = ray.get(call, timeout=CALL_TIMEOUT_S)
            if lease is None:
                return None
            return _Block(self._rows(ledger, lease)[lease.start : lease.end], request)
        except StaleIncarnation:
            self._stop.set()  # a newer process has this learner's place
            return None
        except (RayError, ValueError, TimeoutError) as error:
            _log.info("no lease: %s", error)
            return None

    def _rows(self, ledger: Any, lease: Lease) -> npt.NDArray[Any]:
        """All rows of a block, or where they are."""
        if not self._spec.config.data.streaming:
            return self._permutation.indices(lease.epoch, lease.block)
        call = ledger.rows.remote(lease.epoch, lease.block)
        return np.array(ray.get(call, timeout=ROWS_TIMEOUT_S))  # a copy: what arrives is another process' memory
