"""Rank 0's side of a group: an inner loop, and fragments, that take all ranks along."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.config import TrainConfig
from app.diloco.fragments import Fragment, gather
from app.learning.gradients import ShareGradients
from app.learning.group_moments import described, gather_moments, spread_moments
from app.learning.inner import InnerLoop, StepResult
from app.learning.moments import States
from app.learning.orders import Kind, Order, give
from app.learning.ranks import Ranks
from app.learning.shards import collect, hand_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BEAT_EVERY_S = 1.0


class LeadLoop(InnerLoop):
    """The inner loop of rank 0: what it is told to do, it tells the others, and does with them.

    One thread makes all calls. They raise GroupBroken when another rank is gone or late; nothing can be done then but
    to end this process.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, ranks: Ranks, patience_s: Callable[[], float]):
        """`patience_s` says how long ranks may now be late."""
        super().__init__(model, config, ranks)
        self._ranks: Ranks = ranks
        self._patience_s = patience_s
        self._told_at = time.monotonic()

    @property
    def sharded(self) -> bool:
        """Whether parameters and optimizer state are cut into parts."""
        return self._ranks.sharded

    def tell(self, order: Order) -> None:
        """Give an order."""
        give(order, self._ranks, self._patience_s())
        self._told_at = time.monotonic()

    def beat(self) -> None:
        """Between two steps: let the others know that this rank lives, if they have heard nothing for a while."""
        if time.monotonic() - self._told_at >= BEAT_EVERY_S:
            self.tell(Order(Kind.BEAT))

    def end(self) -> None:
        """Let the others go."""
        self.tell(Order(Kind.END))

    def step(
        self,
        batches: Sequence[Tensor],
        lr: float,
        parameter_lock: AbstractContextManager[Any],
        share: ShareGradients | None = None,
    ) -> StepResult:
        """One step of all ranks on `batches` (each int64 [B, S]), as many for each rank."""
        assert share is None  # gradients are the group's own
        own = len(batches) // self._ranks.world
        rows, length = batches[0].shape
        self.tell(Order(Kind.STEP, lr, (own, rows, length)))
        for rank in range(1, self._ranks.world):
            self._ranks.send(torch.stack(list(batches[rank * own : (rank + 1) * own])), rank)
        result = super().step(batches[:own], lr, parameter_lock)
        return replace(result, tokens=sum(batch.numel() for batch in batches))

    def moments(self) -> States:
        """A copy of the optimizers' states, whole; sharded ones on the CPU."""
        if not self._ranks.sharded:
            return super().moments()
        self.tell(Order(Kind.GATHER_MOMENTS))
        return gather_moments(self.optimizer_state(), self._ranks)

    def load_optimizer_state(self, states: States) -> None:
        """All ranks take over the optimizers' states, which are whole."""
        description = described(states)
        self.tell(Order(Kind.LOAD_MOMENTS, sizes=(len(description), 0, 0)))
        self._ranks.broadcast(torch.frombuffer(bytearray(description), dtype=torch.uint8))
        super().load_optimizer_state(spread_moments(description, states, self.optimizers, self._ranks))

    def rng_states(self) -> Tensor:
        """The states of all ranks' random generators, uint8 [W, bytes]."""
        self.tell(Order(Kind.GATHER_RNG))
        own = torch.get_rng_state()
        states = own.repeat(self._ranks.world, 1)
        for rank in range(1, self._ranks.world):
            self._ranks.receive(states[rank], rank)
        return states

    def load_rng_states(self, states: Tensor) -> None:
        """What `rng_states` gave for a group of the same size; of another size nothing is taken over."""
        if len(states) != self._ranks.world:
            return
        self.tell(Order(Kind.LOAD_RNG, sizes=(states.shape[1], 0, 0)))
        torch.set_rng_state(states[0].clone())
        for rank in range(1, self._ranks.world):
            self._ranks.send(states[rank].contiguous(), rank)


class GroupWeights:
    """The group's parameters by fragment (`app.diloco.weights`), as rank 0 reads and writes them."""

    def __init__(self, loop: LeadLoop, parameters: Mapping[str, Tensor], ranks: Ranks):
        self._loop, self._parameters, self._ranks = loop, parameters, ranks

    def gather(self, fragment: Fragment) -> Tensor:
        """A copy of the fragment, fp32 [numel] on the CPU; of a sharded group each rank's part of it is fetched."""
        if not self._ranks.sharded:
            return gather(fragment, self._parameters)
        self._loop.tell(Order(Kind.READ, sizes=(fragment.index, 0, 0)))
        return collect(fragment, self._parameters, self._ranks)

    def scatter(self, fragment: Fragment, flat: Tensor) -> None:
        """Write the fragment, fp32 [numel], on all ranks."""
        self._loop.tell(Order(Kind.WRITE, sizes=(fragment.index, 0, 0)))
        hand_out(fragment, flat, self._parameters, self._ranks)
