"""The training loss, in one place for training and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100


def next_token_loss(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of tokens 1 … S−1 given those before, for `batch` int64 [B, S].

    The last position has no target and is ignored; cutting it off would copy all logits, there and back.
    """
    targets = functional.pad(batch[:, 1:], (0, 1), value=IGNORED)
    logits = model(input_ids=batch, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
