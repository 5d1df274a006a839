"""The outer step: SGD with Nesterov (DiLoCo, arXiv 2311.08105) or plain momentum on the global parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from app.diloco.settings import OUTER_RULES


def outer_step(rule: str, theta: Tensor, momentum: Tensor, grad: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """b ← μb + v; then Θ ← Θ − η(v + μb) by `nesterov`, or Θ ← Θ − ηb by `sgd`.

    Returns (Θ, b) as new fp32 tensors; the arguments stay as they are. `theta` Θ, `momentum` b (zeros at the start)
    and `grad` v have one shape; `lr` is η, `mu` is μ. The same as `torch.optim.SGD` with `nesterov=True` or without,
    whose buffer starts as the first gradient, which is what b = 0 gives.
    Multiplications and additions are separate operations, so that the bits do not depend on the number of
    threads. Raises ValueError for unequal shapes and for another rule.
    """
    if rule not in OUTER_RULES:
        raise ValueError(f"unknown outer rule {rule!r}, allowed: {', '.join(OUTER_RULES)}")
    if not theta.shape == momentum.shape == grad.shape:
        shapes = [tuple(x.shape) for x in (theta, momentum, grad)]
        raise ValueError(f"theta, momentum and grad differ in shape: {shapes}")
    with torch.no_grad():
        v = grad.to(torch.float32)
        b = momentum.to(torch.float32) * mu + v
        move = v + b * mu if rule == "nesterov" else b
        return theta.to(torch.float32) - move * lr, b
