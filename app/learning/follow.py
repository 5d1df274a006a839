"""The other ranks' side of a group: they know nothing of the protocol, and do what rank 0 says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from app.config import TrainConfig
from app.diloco.fragments import Layout
from app.learning.group_moments import gather_moments, spread_moments
from app.learning.inner import InnerLoop
from app.learning.orders import Kind, Order, take
from app.learning.ranks import Ranks
from app.learning.shards import collect, hand_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Follower:
    """A rank other than 0."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig, layout: Layout, ranks: Ranks):
        """`layout` is of the model. A collective call: rank 0 makes its loop at the same time."""
        self._loop, self._layout, self._ranks = InnerLoop(model, config, ranks), layout, ranks
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        torch.manual_seed(torch.initial_seed() + ranks.rank)  # what is random in a step differs between ranks

    def follow(self, heard: Callable[[float], None] = lambda _: None) -> None:
        """Carry out orders until the one to end.

        `heard` is told after each for how many seconds the next may take, its work included. Raises GroupBroken when
        rank 0 is gone or silent.
        """
        while (order := take(self._ranks)).kind != Kind.END:
            heard(self._ranks.patience_s)
            self._carry_out(order)
            heard(self._ranks.patience_s)

    def _carry_out(self, order: Order) -> None:
        ranks, size = self._ranks, order.sizes[0]
        match order.kind:
            case Kind.STEP:
                batches = torch.empty(order.sizes, dtype=torch.int64)
                ranks.receive(batches, 0)
                self._loop.step(list(batches), order.value, nullcontext())
            case Kind.WRITE:
                hand_out(self._layout.fragments[size], None, self._parameters, ranks)
            case Kind.READ:
                collect(self._layout.fragments[size], self._parameters, ranks)
            case Kind.GATHER_MOMENTS:
                gather_moments(self._loop.optimizer_state(), ranks)
            case Kind.LOAD_MOMENTS:
                description = torch.empty(size, dtype=torch.uint8)
                ranks.broadcast(description)
                parts = spread_moments(description.numpy().tobytes(), None, self._loop.optimizers, ranks)
                self._loop.load_optimizer_state(parts)
            case Kind.GATHER_RNG:
                ranks.send(torch.get_rng_state(), 0)
            case Kind.LOAD_RNG:
                state = torch.empty(size, dtype=torch.uint8)
                ranks.receive(state, 0)
                torch.set_rng_state(state)
