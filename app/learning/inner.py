"""The inner loop: AdamW steps on one learner's own data, in its process, on CPU or GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.config import TrainConfig
from app.learning.loss import next_token_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepResult:
    """What one step did. `skipped`: loss or gradient was not finite, so nothing was written."""

    loss: float
    """Mean nats per predicted token."""
    tokens: int
    """Tokens of the batches: samples × seq_len."""
    grad_norm: float
    """Before clipping."""
    skipped: bool


class InnerLoop:
    """A model and its AdamW: fp32 master weights, bf16 autocast where wanted, one Accelerator a process.

    Moves `model` to the device. Gradients are taken outside the parameter lock; only the optimizer's writing holds it.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        from accelerate import Accelerator

        bf16 = wants_bf16(config.precision)
        self._accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no")
        self._clip = config.grad_clip
        model.train()
        self.model, self._optimizer = self._accelerator.prepare(model, _adamw(model, config))
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        device: torch.device = self._accelerator.device
        return device

    def step(self, batches: Sequence[Tensor], lr: float, parameter_lock: AbstractContextManager[Any]) -> StepResult:
        """Take one optimizer step on the mean gradient of `batches` (each int64 [B, S]) at learning rate `lr`.

        A loss or gradient that is NaN or Inf skips the step: weights and moments stay as they were.
        """
        loss = torch.zeros((), device=self.device)
        for batch in batches:
            share = next_token_loss(self.model, batch.to(self.device)) / len(batches)
            self._accelerator.backward(share)
            loss += share.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        loss_value, norm_value = float(loss), float(norm)
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            with parameter_lock:
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        tokens = sum(batch.numel() for batch in batches)
        return StepResult(loss_value, tokens, norm_value, skipped=not finite)

    def optimizer_state(self) -> dict[str, Any]:
        """Return AdamW's state (moments fp32 on the device, views of the live ones)."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take over AdamW's state. Raises ValueError when it is of another model."""
        self._optimizer.load_state_dict(state)


def wants_bf16(precision: str) -> bool:
    """Tell whether `precision` ("auto", "bf16" or "fp32") means bf16 autocast: "auto" where a CUDA device has it."""
    if precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return precision == "bf16"


def _adamw(model: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only: not norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
