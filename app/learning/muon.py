"""Muon where torch's own does not do: where bfloat16 is slow, and where matrices are cut into rows on several ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from app.learning.shards import local, rows_here, whole


class FloatMuon(torch.optim.Muon):
    """`torch.optim.Muon` (Nesterov momentum, updates of AdamW's size) with its orthogonalisation in float32.

    torch iterates in bfloat16, one matrix after the other; processors without bfloat16 units take ten times as long for
    that as for float32. Here matrices of one shape, or its transpose, are iterated together. The state
    (`momentum_buffer`) is that of `torch.optim.Muon`, and an update differs by no more than bfloat16 rounds.

    An update needs the whole matrix. Of a sharded one each rank keeps momentum for its own rows; what is to be
    orthogonalised is gathered on every rank, for the matrices of one shape at a time, and each takes its rows of the
    result. So all ranks do that work alike; on GPUs it is done in bfloat16, as torch's own does.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float):
        super().__init__(matrices, lr, weight_decay, momentum, nesterov=True, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[min(parameter.shape), max(parameter.shape)].append(parameter)
            for (_, longer), parameters in alike.items():
                self._step(parameters, group, size=0.2 * math.sqrt(longer))
        return loss

    def _step(self, parameters: list[Tensor], group: dict[str, Any], size: float) -> None:
        wanted = torch.stack([_wide(whole(self._momentum(parameter, group["momentum"]))) for parameter in parameters])
        if wanted.is_cuda:
            wanted = wanted.bfloat16()
        updates = orthogonal(wanted, group["ns_coefficients"], group["ns_steps"], group["eps"])
        for parameter, update in zip(parameters, updates, strict=True):
            rows = rows_here(parameter)
            update = update if parameter.shape[0] <= parameter.shape[1] else update.T
            own = local(parameter)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(update[rows.start : rows.stop], alpha=-group["lr"] * size)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def orthogonal(
    matrices: Tensor, coefficients: tuple[float, float, float], iterations: int, smallest_norm: float
) -> Tensor:
    """Return U Vᵀ of each matrix's singular value decomposition, its singular values only near 1 (Muon's quintic).

    `matrices`: [n, rows ≤ columns] of floating point; the result has the same shape and type.
    """
    a, b, c = coefficients
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=smallest_norm)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _wide(matrix: Tensor) -> Tensor:
    """A view with no more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
