"""What rank 0 of a learner tells the other ranks to do, so that all take part in the same calls at the same moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from app.learning.ranks import Ranks


class Kind(IntEnum):
    """An order; what follows it on the channel is told with each."""

    BEAT = 0
    """Nothing to do; rank 0 lives."""
    STEP = 1
    """An inner step at the learning rate `value`; micro-batches of shape `sizes` follow to each rank."""
    WRITE = 2
    """Write fragment `sizes[0]`; its values follow."""
    READ = 3
    """Send your part of fragment `sizes[0]`."""
    GATHER_MOMENTS = 4
    """Send your part of the optimizers' states."""
    LOAD_MOMENTS = 5
    """Take over optimizers' states; `sizes[0]` bytes that say what is in them follow, then the values."""
    GATHER_RNG = 6
    """Send the state of your random generator."""
    LOAD_RNG = 7
    """Take over a state of your random generator, of `sizes[0]` bytes, which follows."""
    END = 8
    """It is over."""


@dataclass(frozen=True)
class Order:
    """One order of rank 0's."""

    kind: Kind
    value: float = 0.0
    sizes: tuple[int, int, int] = (0, 0, 0)


def give(order: Order, ranks: Ranks, patience_s: float) -> None:
    """Tell the others, and that they and rank 0 wait for each other as long from now on. Raises GroupBroken."""
    ranks.broadcast(torch.tensor([order.kind, order.value, patience_s, *order.sizes], dtype=torch.float64))
    ranks.patience_s = patience_s


def take(ranks: Ranks) -> Order:
    """Wait for rank 0's next order. Raises GroupBroken when none comes in time."""
    header = torch.empty(6, dtype=torch.float64)
    ranks.broadcast(header)
    kind, value, patience_s, *sizes = header.tolist()
    ranks.patience_s = patience_s
    a, b, c = (int(size) for size in sizes)
    return Order(Kind(int(kind)), value, (a, b, c))
