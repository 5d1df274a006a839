"""Split the parameters into P fragments of nearly equal size, the same on every learner and on the syncer.

Balanced tensor fragmentation (Decoupled DiLoCo, arXiv 2604.21428): traffic is then the same at every step.
Row cuts of embedding-like tensors are ours: their merge is elementwise, so a cut does not change it, and
whole, one embedding would be the largest fragment of a small model by far.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

RULE = "balanced-rows-1"
"""Name of the packing rule, part of the layout hash: change it whenever the packing changes."""


@dataclass(frozen=True)
class TensorSpec:
    """One trainable tensor: name, shape, and whether it merges elementwise (embeddings, output head)."""

    name: str
    shape: tuple[int, ...]
    embedding_like: bool

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Rows [start_row, stop_row) of tensor `name`, or all of it; `shape` is the piece's own shape.

    A scalar is a piece of shape () with rows [0, 1).
    """

    name: str
    start_row: int
    stop_row: int
    shape: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Fragment:
    """Fragment p: its pieces, in the order in which they lie in the flat vector of `numel` elements."""

    index: int
    pieces: tuple[Piece, ...]
    numel: int


@dataclass(frozen=True)
class Layout:
    """All P fragments. Equal hashes mean equal layouts; a learner states its hash when it joins."""

    fragments: tuple[Fragment, ...]
    numel: int
    embedding_like: frozenset[str]
    hash: str

    @property
    def balance(self) -> float:
        """Elements of the largest fragment over those of the mean one: 1.0 is perfect."""
        return max(fragment.numel for fragment in self.fragments) * len(self.fragments) / self.numel


def build_layout(specs: Sequence[TensorSpec], fragments: int) -> Layout:
    """Pack tensors into P = `fragments` bins: largest first, each into the emptiest bin.

    Embedding-like tensors come last: one that would make a bin larger than the mean or the largest is dealt
    out row by row, each row to the emptiest bin. Ties go by name and bin index, so the order of `specs` does
    not matter.

    Raises ValueError when P < 1, when P is greater than the number of tensors, when a name comes twice, or
    when a tensor has no elements.
    """
    _check_specs(specs, fragments)
    bins: list[list[Piece]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    mean = math.ceil(sum(spec.numel for spec in specs) / fragments)
    for spec in sorted(specs, key=lambda s: (s.embedding_like, -s.numel, s.name)):
        emptiest = _emptiest(loads)
        if not spec.embedding_like or loads[emptiest] + spec.numel <= max(mean, *loads):
            counts = {emptiest: _rows(spec)}
        else:
            counts = _deal_rows(spec, loads)
        start = 0
        for index, rows in sorted(counts.items()):
            piece = _piece(spec, start, start + rows)
            bins[index].append(piece)
            loads[index] += piece.numel
            start += rows
    packed = tuple(
        Fragment(index, tuple(sorted(pieces, key=lambda piece: (piece.name, piece.start_row))), load)
        for index, (pieces, load) in enumerate(zip(bins, loads, strict=True))
    )
    embedding_like = frozenset(spec.name for spec in specs if spec.embedding_like)
    return Layout(packed, sum(loads), embedding_like, _hash(packed, embedding_like))


def specs_of(model: nn.Module) -> list[TensorSpec]:
    """The trainable parameters of a model, tied ones once (under their first name), without buffers.

    Embedding-like are the weights of `nn.Embedding` modules and of the output head. The head is what
    `get_output_embeddings()` returns; for a model without that method, modules named `lm_head`, and the last
    Linear if its weight has the shape of an embedding's. Parameters without elements have nothing to
    synchronise.
    """
    embedding_like = {id(weight) for weight in embedding_weights(model)}
    return [
        TensorSpec(name, tuple(parameter.shape), id(parameter) in embedding_like)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() > 0
    ]


def gather(fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """Copy a fragment out of named tensors (any dtype or device) into a new flat fp32 CPU tensor [numel].

    Raises KeyError for a missing tensor and ValueError for one of another shape.
    """
    flat = torch.empty(fragment.numel, dtype=torch.float32)
    for piece, view in pieces_of(fragment, flat):
        view.copy_(_select(piece, tensors).detach())
    return flat


def scatter_(fragment: Fragment, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy a flat fragment [numel] into named tensors, in place, cast to their dtypes, outside autograd.

    Raises KeyError for a missing tensor and ValueError for a wrong size of `flat` or of a tensor.
    """
    with torch.no_grad():
        for piece, view in pieces_of(fragment, flat):
            _select(piece, tensors).copy_(view)


def pieces_of(fragment: Fragment, flat: Tensor) -> list[tuple[Piece, Tensor]]:
    """The pieces of a flat fragment [numel], each with a view of its elements in the piece's shape.

    Raises ValueError when `flat` is not of shape [numel].
    """
    if flat.shape != (fragment.numel,):
        raise ValueError(f"fragment {fragment.index} has {fragment.numel} elements, got shape {tuple(flat.shape)}")
    views = torch.split(flat, [piece.numel for piece in fragment.pieces])
    return [(piece, view.view(piece.shape)) for piece, view in zip(fragment.pieces, views, strict=True)]


def due_step_offset(p: int, P: int, H: int) -> int:
    """The step within each H at which fragment p is due: floor(pH/P)."""
    return p * H // P


def table(layout: Layout, merge: str = "rda") -> str:
    """The layout as text: every fragment with its size, share and pieces, and how each piece is merged.

    `merge` is the rule of the run (`rda` or `mean`).
    """
    lines = [f"{'fragment':<10}{'numel':>14}{'share':>8}  {'rule':<6}tensor"]
    for fragment in layout.fragments:
        share = f"{fragment.numel / layout.numel:.1%}"
        lines.append(f"{fragment.index:<10}{fragment.numel:>14,}{share:>8}  {'':<6}{_count(len(fragment.pieces))}")
        for piece in fragment.pieces:
            # Only embedding-like tensors are ever cut: the rows say something for those alone.
            cut = piece.name in layout.embedding_like
            rule = "mean" if cut or merge == "mean" else "rda"
            label = _label(piece) if cut else piece.name
            share = f"{piece.numel / layout.numel:.1%}"
            lines.append(f"{'':<10}{piece.numel:>14,}{share:>8}  {rule:<6}{label}")
    lines.append(f"{'all':<10}{layout.numel:>14,}{'100.0%':>8}  largest/mean {layout.balance:.3f}")
    return "\n".join(lines)


def _check_specs(specs: Sequence[TensorSpec], fragments: int) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"tensor names come twice: {sorted({n for n in names if names.count(n) > 1})}")
    if empty := [spec.name for spec in specs if spec.numel == 0]:
        raise ValueError(f"tensors without elements cannot be packed: {empty}")
    if not 1 <= fragments <= len(specs):
        raise ValueError(f"fragments must be 1 to {len(specs)} (the number of trainable tensors), got {fragments}")


def _emptiest(loads: Sequence[int]) -> int:
    return min(range(len(loads)), key=lambda index: (loads[index], index))


def _deal_rows(spec: TensorSpec, loads: Sequence[int]) -> dict[int, int]:
    """How many rows of `spec` each bin gets, when every row goes to the bin that is then the emptiest."""
    filled = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(filled)
    counts: dict[int, int] = {}
    rows = _rows(spec)
    for _ in range(rows):
        load, index = filled[0]
        heapq.heapreplace(filled, (load + spec.numel // rows, index))
        counts[index] = counts.get(index, 0) + 1
    return counts


def _rows(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _piece(spec: TensorSpec, start: int, stop: int) -> Piece:
    shape = (stop - start, *spec.shape[1:]) if spec.shape else ()
    return Piece(spec.name, start, stop, shape, math.prod(shape))


def _select(piece: Piece, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[piece.name]
    rows = tensor[piece.start_row : piece.stop_row] if tensor.dim() else tensor
    if tuple(rows.shape) != piece.shape:
        raise ValueError(f"{_label(piece)} should have shape {piece.shape}, has {tuple(rows.shape)}")
    return rows


def embedding_weights(model: nn.Module) -> list[Tensor]:
    """Weights that are merged by mean and not trained by Muon: token and position embeddings, the output head."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    find_head = getattr(model, "get_output_embeddings", None)
    if find_head is not None:
        head = find_head()
        return weights if head is None else [*weights, head.weight]
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    heads = [module.weight for name, module in linears if name.split(".")[-1] == "lm_head"]
    # Only the last one: a hidden projection may well have the shape of a position embedding.
    last = [module.weight for _, module in linears[-1:] if module.weight.shape in {w.shape for w in weights}]
    return weights + heads + last


def _hash(fragments: Sequence[Fragment], embedding_like: frozenset[str]) -> str:
    rows = [
        [[piece.name, piece.start_row, piece.stop_row, list(piece.shape)] for piece in fragment.pieces]
        for fragment in fragments
    ]
    facts = {
        "rule": RULE,
        "P": len(fragments),
        "fragments": rows,
        "embedding_like": sorted(embedding_like),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _label(piece: Piece) -> str:
    return f"{piece.name}[{piece.start_row}:{piece.stop_row}]" if piece.shape else piece.name


def _count(pieces: int) -> str:
    return f"{pieces} piece" if pieces == 1 else f"{pieces} pieces"
