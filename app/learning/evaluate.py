"""Loss and bits per byte on held-out rows, averaged over tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from app.learning.loss import next_token_loss
from app.learning.rows import TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class EvalResult:
    """Means over all predicted tokens, and what they are means of."""

    loss: float
    """Nats per predicted token."""
    bits_per_byte: float
    """Bits spent on the predicted tokens for each byte that they stand for."""
    tokens: int
    bytes: int


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, rows: TokenRows, token_bytes: npt.NDArray[np.int32], batch_size: int
) -> EvalResult:
    """Evaluate `model` on all of `rows` [N, S]; the first token of each row is context only.

    loss = Σ nats / tokens;  bits per byte = Σ nats / (ln 2 · Σ bytes of the predicted tokens). End-of-text tokens
    are predicted and stand for no byte, so they count in full against the model. `token_bytes` [V] are the bytes of
    each token. Raises ValueError without rows.
    """
    if len(rows) == 0:
        raise ValueError("nothing to evaluate on")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    nats, tokens, size = 0.0, 0, 0
    for start in range(0, len(rows), batch_size):
        batch = rows.take(np.arange(start, min(start + batch_size, len(rows))))
        predicted = batch[:, 1:].numpy()
        nats += float(next_token_loss(model, batch.to(device))) * predicted.size
        tokens += predicted.size
        size += int(token_bytes[predicted].sum(dtype=np.int64))
    model.train(was_training)
    bits = nats / math.log(2)
    return EvalResult(nats / tokens, bits / size if size else math.inf, tokens, size)
