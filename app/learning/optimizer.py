"""The inner optimizers: AdamW, or Muon for the matrices with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.config import TrainConfig
from app.diloco.fragments import embedding_weights
from app.learning.muon import FloatMuon

if TYPE_CHECKING:
    from torch import nn


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the trained parameters, each parameter in one of them.

    `adamw`: AdamW for all. `muon`: `torch.optim.Muon`, on a CPU or of sharded matrices `FloatMuon`, for the matrices
    that are no embeddings (token embeddings and output head), AdamW for everything else. Muon's update is scaled to
    AdamW's usual size (0.2 · √max(rows, columns), Moonlight, arXiv 2502.16982), so one learning rate serves both.
    Weight decay is for matrices only.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adamw":
        return [_adamw(trained, config)]
    embeddings = {id(weight) for weight in embedding_weights(model)}
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in embeddings]
    inside = {id(p) for p in matrices}
    rest = [p for p in trained if id(p) not in inside]
    if not matrices:
        return [_adamw(trained, config)]
    return [_muon(matrices, config), *([_adamw(rest, config)] if rest else [])]


def _muon(matrices: Sequence[Tensor], config: TrainConfig) -> torch.optim.Muon:
    lr, decay, momentum = config.lr, config.weight_decay, config.muon_momentum
    if matrices[0].device.type == "cpu" or isinstance(matrices[0], DTensor):
        return FloatMuon(matrices, lr, decay, momentum)
    return torch.optim.Muon(matrices, lr, decay, momentum, adjust_lr_fn="match_rms_adamw")


def _adamw(parameters: Sequence[Tensor], config: TrainConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
