"""The outer step: SGD with Nesterov momentum on the global parameters (DiLoCo, arXiv 2311.08105)."""

from __future__ import annotations

import torch
from torch import Tensor


def nesterov_step(theta: Tensor, momentum: Tensor, grad: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """b ← μb + v; Θ ← Θ − η(v + μb). Returns (Θ, b) as new fp32 tensors; the arguments stay as they are.

    `theta` Θ, `momentum` b (zeros at the start) and `grad` v have one shape; `lr` is η, `mu` is μ. The same
    as `torch.optim.SGD(nesterov=True)`, whose buffer starts as the first gradient, which is what b = 0 gives.
    Multiplications and additions are separate operations, so that the bits do not depend on the number of
    threads. Raises ValueError for unequal shapes.
    """
    if not theta.shape == momentum.shape == grad.shape:
        shapes = [tuple(x.shape) for x in (theta, momentum, grad)]
        raise ValueError(f"theta, momentum and grad differ in shape: {shapes}")
    with torch.no_grad():
        v = grad.to(torch.float32)
        b = momentum.to(torch.float32) * mu + v
        return theta.to(torch.float32) - (v + b * mu) * lr, b
