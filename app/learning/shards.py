"""Fragments of parameters whose rows lie on several ranks (FSDP2), gathered to rank 0 and given out one at a time.

FSDP2 cuts dimension 0 of every parameter into W runs of ⌈n/W⌉ rows, the last ones shorter or empty. What is not cut
(DDP: everything) lies whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from app.diloco.fragments import Fragment, Piece, pieces_of
from app.learning.ranks import Ranks


def local(tensor: Tensor) -> Tensor:
    """The rows that lie here; writing to them writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank: a collective call where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows_on(rows: int, rank: int, world: int) -> range:
    """Which of a tensor's rows lie on a rank."""
    share = -(-rows // world)
    return range(min(rank * share, rows), min((rank + 1) * share, rows))


def rows_here(tensor: Tensor) -> range:
    """Which of a tensor's rows lie here."""
    if not isinstance(tensor, DTensor):
        return range(tensor.shape[0])
    return rows_on(tensor.shape[0], tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """The part of `value` (whole, of the parameter's shape) that lies where the parameter does, in fp32."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    part = torch.zeros_like(parameter, dtype=torch.float32)
    rows = rows_here(parameter)
    local(part).copy_(value[rows.start : rows.stop])
    return part


def as_fragment(name: str, tensor: Tensor) -> Fragment:
    """A whole tensor as a fragment, to be gathered like one."""
    shape = tuple(tensor.shape)
    rows = shape[0] if shape else 1
    return Fragment(0, (Piece(name, 0, rows, shape, tensor.numel()),), tensor.numel())


@dataclass(frozen=True)
class _Run:
    """Consecutive elements of a flat fragment that lie on one rank."""

    name: str
    start: int
    stop: int
    """In the flat fragment."""
    rows: range
    """Of the tensor; empty for a scalar."""


def _runs(fragment: Fragment, tensors: Mapping[str, Tensor], rank: int, world: int) -> list[_Run]:
    """What of a fragment lies on a rank; what is not sharded counts as rank 0's."""
    runs, offset = [], 0
    for piece in fragment.pieces:
        tensor, width = tensors[piece.name], piece.numel // max(1, piece.stop_row - piece.start_row)
        if not isinstance(tensor, DTensor):
            here = range(piece.start_row, piece.stop_row) if rank == 0 else range(0)
        else:
            held = rows_on(tensor.shape[0], rank, world)
            here = range(max(held.start, piece.start_row), min(held.stop, piece.stop_row))
        if here:
            first = offset + (here.start - piece.start_row) * width
            runs.append(_Run(piece.name, first, first + len(here) * width, here))
        offset += piece.numel
    return runs


def collect(fragment: Fragment, tensors: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
    """Gather a fragment, fp32 [numel] on the CPU; on ranks other than 0 only their own part of it is there.

    All ranks call it at the same time. Raises GroupBroken.
    """
    flat = torch.zeros(fragment.numel)
    own = _runs(fragment, tensors, ranks.rank, ranks.world)
    for run in own:
        flat[run.start : run.stop] = _rows(run, tensors[run.name]).detach().flatten()
    if ranks.rank != 0:
        if own:
            ranks.send(torch.cat([flat[run.start : run.stop] for run in own]), 0)
        return flat
    for rank in range(1, ranks.world):
        runs = _runs(fragment, tensors, rank, ranks.world)
        if not runs:
            continue
        part = torch.empty(sum(run.stop - run.start for run in runs))
        ranks.receive(part, rank)
        for run, values in zip(runs, part.split([run.stop - run.start for run in runs]), strict=True):
            flat[run.start : run.stop] = values
    return flat


def hand_out(fragment: Fragment, flat: Tensor | None, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write a fragment, fp32 [numel] on rank 0, into the tensors of all ranks.

    All ranks call it at the same time. Raises GroupBroken.
    """
    values = torch.empty(fragment.numel) if flat is None else flat.contiguous()
    ranks.broadcast(values)
    with torch.no_grad():
        for piece, view in pieces_of(fragment, values):
            tensor = tensors[piece.name]
            if not piece.shape:
                local(tensor).copy_(view)
                continue
            held = rows_here(tensor)
            rows = range(max(held.start, piece.start_row), min(held.stop, piece.stop_row))
            if rows:
                part = view[rows.start - piece.start_row : rows.stop - piece.start_row]
                local(tensor)[rows.start - held.start : rows.stop - held.start].copy_(part)


def _rows(run: _Run, tensor: Tensor) -> Tensor:
    """The rows of a run, which lie here."""
    if not tensor.dim():
        return tensor
    first = rows_here(tensor).start
    return local(tensor)[run.rows.start - first : run.rows.stop - first]


def check_rows(tensors: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if torch cuts parameters in another way than this module thinks."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            (placement,) = tensor.placements
            if placement != Shard(0) or len(rows_here(tensor)) != local(tensor).shape[0]:
                raise RuntimeError(f"{name} is cut as {placement} into {tuple(local(tensor).shape)} here")
