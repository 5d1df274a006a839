"""The inner loop: optimizer steps on one learner's own data, in its process, on CPU or GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from app.config import TrainConfig
from app.learning.gradients import Part, ShareGradients
from app.learning.loss import next_token_loss
from app.learning.moments import States, copied, unpacked
from app.learning.ranks import Ranks, group_errors
from app.learning.shards import whole
from app.learning.trainable import trainable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepResult:
    """What one step did. `skipped`: loss or gradient was not finite, so nothing was written."""

    loss: float
    """Mean nats per predicted token, of all ranks or learners that shared the gradient."""
    tokens: int
    """Tokens of the own batches: samples × seq_len."""
    grad_norm: float
    """Before clipping."""
    skipped: bool


class InnerLoop:
    """A model and its optimizers: fp32 master weights, bf16 autocast where wanted, one Accelerator a process.

    Moves `model` to the device. Gradients are taken outside the parameter lock; only the optimizer's writing holds it.
    With `ranks` every one of them has such a loop, and they make each step together.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, ranks: Ranks | None = None) -> None:
        self._accelerator, self.model, self.optimizers = trainable(model, config, ranks)
        self._ranks = ranks
        self._clip = config.grad_clip
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        """What is trained."""

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        device: torch.device = self._accelerator.device
        return device

    def step(
        self,
        batches: Sequence[Tensor],
        lr: float,
        parameter_lock: AbstractContextManager[Any],
        share: ShareGradients | None = None,
    ) -> StepResult:
        """Take one optimizer step on the mean gradient of `batches` (each int64 [B, S]) at learning rate `lr`.

        The mean is over the predicted tokens, as if the batches were one; they may be of different sizes. With `share`
        the gradient is the mean over several learners, of whom this one may have no batch. A loss or gradient that is
        NaN or Inf skips the step: weights and moments stay as they were.
        """
        try:
            with group_errors():
                together = self._take_gradients(batches, lr, share)
                norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters, self._clip)))
                finite = math.isfinite(together.loss) and math.isfinite(norm)
                if finite:
                    self._write(together.lr, parameter_lock)
        finally:  # also when a group broke: the same batches may come again
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        tokens = sum(batch.numel() for batch in batches)
        return StepResult(together.loss, tokens, norm, skipped=not finite)

    def _take_gradients(self, batches: Sequence[Tensor], lr: float, share: ShareGradients | None) -> Part:
        loss = torch.zeros((), device=self.device)
        predicted = sum(batch[:, 1:].numel() for batch in batches)
        for number, batch in enumerate(batches, start=1):
            with self._alone(number < len(batches)):
                part = next_token_loss(self.model, batch.to(self.device)) * (batch[:, 1:].numel() / predicted)
                self._accelerator.backward(part)
            loss += part.detach()
        mean = float(loss) if self._ranks is None else self._ranks.mean(float(loss))
        own = Part(sum(batch.numel() for batch in batches), mean, lr)
        return own if share is None else share(self.parameters, own)

    def _alone(self, apart: bool) -> AbstractContextManager[Any]:
        """Gradients of what is computed in it stay this rank's own; where they are sharded, there is no room for it."""
        if apart and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def _write(self, lr: float, parameter_lock: AbstractContextManager[Any]) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        with parameter_lock:
            for optimizer in self.optimizers:
                optimizer.step()

    def moments(self) -> States:
        """A copy of the optimizers' states, where they are; between two steps."""
        return copied(self.optimizer_state())

    def take_moments(self, data: bytes) -> None:
        """Go on from what another loop of the same kind had (`packed`). Raises Unusable, and changes nothing then."""
        self.load_optimizer_state(unpacked(data, self.optimizers))

    def optimizer_state(self) -> list[dict[str, Any]]:
        """Return the optimizers' states (moments fp32 on the device, views of the live ones)."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_optimizer_state(self, states: list[dict[str, Any]]) -> None:
        """Take over the optimizers' states. Raises ValueError when they are of another model or optimizer."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def rng_states(self) -> Tensor:
        """The states of all workers' random generators, uint8 [W, bytes]."""
        return torch.get_rng_state()[None]

    def load_rng_states(self, states: Tensor) -> None:
        """Go on from what `rng_states` gave."""
        torch.set_rng_state(states[0].clone())

    def state(self) -> dict[str, Any]:
        """Return all that a step changes: trained parameters and the optimizers' states (views of the live ones)."""
        return {"parameters": [p.detach() for p in self.parameters], "optimizers": self.optimizer_state()}

    def load_state(self, state: dict[str, Any], parameter_lock: AbstractContextManager[Any]) -> None:
        """Take over what `state` returned for the same model and optimizer."""
        with parameter_lock, torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        self.load_optimizer_state(state["optimizers"])
