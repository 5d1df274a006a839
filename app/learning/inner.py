"""The inner loop: optimizer steps on one learner's own data, in its process, on CPU or GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.config import TrainConfig
from app.learning.gradients import Part, ShareGradients
from app.learning.loss import next_token_loss
from app.learning.moments import States, copied, unpacked
from app.learning.optimizer import build_optimizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepResult:
    """What one step did. `skipped`: loss or gradient was not finite, so nothing was written."""

    loss: float
    """Mean nats per predicted token, of all learners that shared the gradient."""
    tokens: int
    """Tokens of the own batches: samples × seq_len."""
    grad_norm: float
    """Before clipping."""
    skipped: bool


class InnerLoop:
    """A model and its optimizers: fp32 master weights, bf16 autocast where wanted, one Accelerator a process.

    Moves `model` to the device. Gradients are taken outside the parameter lock; only the optimizer's writing holds it.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        from accelerate import Accelerator

        bf16 = wants_bf16(config.precision)
        self._accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no")
        self._clip = config.grad_clip
        model.train()
        self.model, *self.optimizers = self._accelerator.prepare(model, *build_optimizers(model, config))
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

        With `share` the gradient is the mean over several learners, of whom this one may have no batch. A loss or
        gradient that is NaN or Inf skips the step: weights and moments stay as they were.
        """
        try:
            whole = self._take_gradients(batches, lr, share)
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._clip))
            finite = math.isfinite(whole.loss) and math.isfinite(norm)
            if finite:
                self._write(whole.lr, parameter_lock)
        finally:  # also when a group broke: the same batches may come again
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        tokens = sum(batch.numel() for batch in batches)
        return StepResult(whole.loss, tokens, norm, skipped=not finite)

    def _take_gradients(self, batches: Sequence[Tensor], lr: float, share: ShareGradients | None) -> Part:
        loss = torch.zeros((), device=self.device)
        for batch in batches:
            part = next_token_loss(self.model, batch.to(self.device)) / len(batches)
            self._accelerator.backward(part)
            loss += part.detach()
        own = Part(sum(batch.numel() for batch in batches), float(loss), lr)
        return own if share is None else share(self.parameters, own)

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

    def state(self) -> dict[str, Any]:
        """Return all that a step changes: trained parameters and the optimizers' states (views of the live ones)."""
        return {"parameters": [p.detach() for p in self.parameters], "optimizers": self.optimizer_state()}

    def load_state(self, state: dict[str, Any], parameter_lock: AbstractContextManager[Any]) -> None:
        """Take over what `state` returned for the same model and optimizer."""
        with parameter_lock, torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        self.load_optimizer_state(state["optimizers"])


def wants_bf16(precision: str) -> bool:
    """Tell whether `precision` ("auto", "bf16" or "fp32") means bf16 autocast: "auto" where a CUDA device has it."""
    if precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return precision == "bf16"
