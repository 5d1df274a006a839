"""Which samples lie in which block: one seeded permutation of all samples for each epoch, cut into blocks.

Pure. A lease of a block is a few integers: whoever has the data works out the samples itself from (seed, epoch).
Nothing depends on how many learners there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, order=True)
class Place:
    """Samples `start` to `end` (not included) of a block."""

    epoch: int
    block: int
    start: int
    end: int


class Blocks(Protocol):
    """Where new blocks come from."""

    def place(self, number: int, /) -> Place | None:
        """The `number`-th block, counted over all epochs from 0; None when it is not known yet."""


class Permutation:
    """One permutation of all samples for each epoch, cut into blocks; the last block of an epoch may be short."""

    def __init__(self, seed: int, n_samples: int, block_samples: int) -> None:
        if n_samples < 1 or block_samples < 1:
            raise ValueError(f"need samples and a block size, got {n_samples} and {block_samples}")
        self._seed = seed
        self._n_samples = n_samples
        self._block_samples = block_samples
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def blocks(self) -> int:
        """Blocks in an epoch."""
        return -(-self._n_samples // self._block_samples)

    def place(self, number: int) -> Place:
        """The `number`-th block, counted over all epochs from 0."""
        epoch, block = divmod(number, self.blocks)
        return Place(epoch, block, 0, min(self._block_samples, self._n_samples - block * self._block_samples))

    def indices(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        """Return the sample indices of a block, [block_samples] or fewer. Raises IndexError past the epoch's end."""
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} of {self.blocks}")
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
            self._order = generator.permutation(self._n_samples)
            self._epoch = epoch
        return self._order[block * self._block_samples : (block + 1) * self._block_samples]
