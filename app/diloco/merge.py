"""Merge the outer gradients of several learners into one: token weights, weighted mean, RDA.

Every result has the same bits whatever the number of threads. Elementwise work multiplies and adds in separate
operations, each rounded once: a fused multiply-add may round otherwise, and how threads share the work could
decide which elements get one. Sums run in numpy, on one thread, over fixed-size chunks. Learners come in the
caller's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from app.diloco.fragments import Fragment, Layout, pieces_of

NORM_CHUNK = 65_536
"""Elements of one partial sum of a norm."""

_TINY = float(np.finfo(np.float32).tiny)


def token_weight(c_tokens: int, c_steps: int) -> float:
    """w = c_tokens · (c_tokens / c_steps), quantity times quality, in tokens² per step; 0 without a step.

    Source: Decoupled DiLoCo (arXiv 2604.21428). Raises ValueError for negative counters.
    """
    if c_tokens < 0 or c_steps < 0:
        raise ValueError(f"counters cannot be negative: c_tokens={c_tokens}, c_steps={c_steps}")
    return c_tokens * (c_tokens / c_steps) if c_steps else 0.0


def weighted_mean(vs: Sequence[Tensor], ws: Sequence[float]) -> Tensor:
    """Σ w v / Σ w, elementwise in fp32. `vs`: one shape, any float dtype; returns fp32 of that shape.

    Raises ValueError without tensors, for unequal shapes or counts, for weights that are negative or not
    finite, and for Σ w = 0.
    """
    return _combine(vs, _shares(vs, ws))


def rda(vs: Sequence[Tensor], ws: Sequence[float], threshold: float) -> Tensor:
    """Radial-Directional Averaging of a tensor: (Σ w‖v‖ / Σ w) · φ(Σ w φ(v) / Σ w), φ(x) = x/‖x‖, φ(0) = 0.

    Keeps the mean norm where a plain mean of nearly orthogonal vectors shrinks like 1/√M. When the norm of
    the mean direction is under `threshold` (0 to 1; M orthogonal directions have 1/√M) the directions cancel
    and say nothing: the weighted mean is returned. Source: Decoupled DiLoCo (arXiv 2604.21428); the threshold
    is ours. Shapes, dtypes and errors as for `weighted_mean`.
    """
    shares = _shares(vs, ws)
    norms = [norm(v) for v in vs]
    # Under the smallest normal fp32 a direction is rounding noise, and its inverse norm may be Inf in fp32.
    direction = _combine(vs, [s / n if n >= _TINY else 0.0 for s, n in zip(shares, norms, strict=True)])
    length = norm(direction)
    if length < max(threshold, _TINY):
        return _combine(vs, shares)
    radius = math.fsum(s * n for s, n in zip(shares, norms, strict=True))
    return direction * (radius / length)


def merge_fragment(
    fragment: Fragment,
    layout: Layout,
    outer_grads: Sequence[Tensor],
    weights: Sequence[float],
    rule: str,
    threshold: float,
) -> Tensor:
    """Merge flat outer gradients v_m [numel] of one fragment, in learner-id order, into one fp32 [numel].

    By `rda`, embedding-like pieces by weighted mean, every other tensor by RDA with `threshold`; by `mean`, all by
    weighted mean.
    Raises ValueError as `weighted_mean` does, and for a vector that is not [numel].
    """
    _shares(outer_grads, weights)
    merged = torch.empty(fragment.numel, dtype=torch.float32)
    columns = zip(*(pieces_of(fragment, v) for v in outer_grads), strict=True)
    for (piece, out), column in zip(pieces_of(fragment, merged), columns, strict=True):
        vs = [view for _, view in column]
        if rule == "mean" or piece.name in layout.embedding_like:
            out.copy_(weighted_mean(vs, weights))
        else:
            out.copy_(rda(vs, weights, threshold))
    return merged


def norm(x: Tensor) -> float:
    """‖x‖, the Euclidean norm: float64 partial sums over chunks of `NORM_CHUNK` elements, added in order."""
    flat = x.detach().to("cpu", torch.float32).reshape(-1).numpy()
    total = 0.0
    for start in range(0, flat.size, NORM_CHUNK):
        chunk = flat[start : start + NORM_CHUNK].astype(np.float64)
        total += float(np.square(chunk, out=chunk).sum())
    return math.sqrt(total)


def finite_norm(x: Tensor) -> bool:
    """Whether ‖x‖² is finite in the dtype of x, a vector: neither NaN nor Inf is in it, nor what overflows."""
    return bool(torch.isfinite(torch.dot(x, x)))


def _shares(vs: Sequence[Tensor], ws: Sequence[float]) -> list[float]:
    """Check a quorum and return w / Σ w for each member."""
    if not vs:
        raise ValueError("nothing to merge: no contribution")
    if len(vs) != len(ws):
        raise ValueError(f"{len(vs)} contributions but {len(ws)} weights")
    if len({v.shape for v in vs}) > 1:
        raise ValueError(f"contributions differ in shape: {[tuple(v.shape) for v in vs]}")
    if any(not math.isfinite(w) or w < 0 for w in ws):
        raise ValueError(f"weights must be finite and at least 0, got {list(ws)}")
    total = math.fsum(ws)
    if total <= 0:
        raise ValueError("nothing to merge: all weights are 0")
    return [w / total for w in ws]


def _combine(vs: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Σ factor · v in fp32, in the given order."""
    total = torch.zeros(vs[0].shape, dtype=torch.float32)
    for v, factor in zip(vs, factors, strict=True):
        total += v.detach().to("cpu", torch.float32) * factor
    return total
