"""Synchronous data parallel: the mean gradient of several learners, through `torch.distributed`.

Every member of a group gives its own gradient to each step and gets the same mean, so members that start with the same
weights keep the same ones bit for bit. One all-reduce of one flat fp32 buffer a step; what else the members must agree
on travels in it.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from app.learning.gathering import Formation


class GroupBroken(RuntimeError):
    """A member is gone or did not come in time; the group can't be used any more."""


@dataclass(frozen=True)
class Part:
    """What goes with a gradient: one member's, or that of all together."""

    tokens: int
    """Tokens of its batches: the weight of its gradient."""
    loss: float
    """Mean nats per predicted token."""
    lr: float
    """Learning rate; of all together the mean, as members estimate the global tokens a little differently."""


@dataclass(frozen=True)
class Signs:
    """What a member tells the others with its gradient."""

    leaving: bool = False
    """It will not come to another step, so nobody must wait for it there."""
    meeting: bool = False
    """Somebody waits at the rendezvous: after this step all go there."""


ShareGradients = Callable[[Sequence[Tensor], Part], Part]
"""Replaces the parameters' gradients by their mean over all members; own part in, that of all together out."""

SCALARS = 6


def flat_buffer(parameters: Sequence[Tensor]) -> Tensor:
    """A buffer for `mean_gradients` of these parameters: fp32 [numel + SCALARS], where they are."""
    return torch.zeros(sum(p.numel() for p in parameters) + SCALARS, device=parameters[0].device)


def mean_gradients(
    parameters: Sequence[Tensor], own: Part, signs: Signs, buffer: Tensor, add_up: Callable[[Tensor], None]
) -> tuple[Part, Signs]:
    """Make every gradient its mean over all members, weighted by their tokens: g ← Σ n_m g_m / Σ n_m.

    `add_up` replaces a tensor by its sum over all members. The gradients become views of `buffer`. A member without
    tokens (and gradients) changes nothing. NaN or Inf of one member become everybody's, so all skip the step; so they
    do when nobody has a token.

    Returns the part of all together and the signs that any member gave, the same bits on every member.
    """
    flat, scalars = buffer[:-SCALARS], buffer[-SCALARS:]
    views = [view.view_as(p) for view, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    for view, parameter in zip(views, parameters, strict=True):
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, own.tokens, out=view)
    scalars.copy_(torch.tensor([own.tokens, own.tokens * own.loss, own.lr, signs.leaving, signs.meeting, 1.0]))
    add_up(buffer)
    tokens, loss, lr, leavers, callers, members = scalars.tolist()
    flat.div_(scalars[0])
    for view, parameter in zip(views, parameters, strict=True):
        parameter.grad = view
    return Part(int(tokens), loss / tokens if tokens else math.nan, lr / members), Signs(leavers > 0, callers > 0)


class Group:
    """A formed group, and the collective calls that training needs. Every member makes the same calls in turn."""

    def __init__(self, formation: Formation, host: str, device: torch.device, timeout_s: float):
        """`host`: this member's own address. Raises GroupBroken when the others don't come within `timeout_s`."""
        self._formation, self._device = formation, device
        timeout = timedelta(seconds=timeout_s)
        with _broken():
            store = distributed.TCPStore(formation.host, formation.port, is_master=False, timeout=timeout)
            keys = distributed.PrefixStore(formation.generation, store)
            if device.type == "cuda":
                self._backend = _nccl(keys, formation, timeout)
            else:
                self._backend = _gloo(keys, formation, timeout, host)

    def add_up(self, tensor: Tensor, timeout_s: float) -> None:
        """Replace a tensor by its sum over all members, the same bits on all. Raises GroupBroken."""
        options = distributed.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        with _broken():
            self._backend.allreduce([tensor], options).wait()

    def spread(self, state: Any, timeout_s: float) -> Any:
        """The source's `state` (numbers and tensors in dictionaries and lists) on every member; from others on the CPU.

        Raises GroupBroken.
        """
        is_source = self._formation.rank == self._formation.source
        blob = _pack(state) if is_source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([blob.numel()], device=self._device)
        self.broadcast(size, timeout_s)
        data = blob.to(self._device) if is_source else torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self.broadcast(data, timeout_s)
        if is_source:
            return state
        return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Make a tensor what it is on the source. Raises GroupBroken."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.timeout = self._formation.source, timedelta(seconds=timeout_s)
        with _broken():
            self._backend.broadcast([tensor], options).wait()

    def send(self, tensor: Tensor, to: int, timeout_s: float) -> None:
        """Send a contiguous tensor to one member, which receives it now. Raises GroupBroken."""
        with _broken():
            self._backend.send([tensor], to, 0).wait(timedelta(seconds=timeout_s))

    def receive(self, tensor: Tensor, sender: int, timeout_s: float) -> None:
        """Make a contiguous tensor what one member sends. Raises GroupBroken."""
        with _broken():
            self._backend.recv([tensor], sender, 0).wait(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Leave: members that still wait for this one are told at once."""
        self._backend.abort()
        del self._backend


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """All that goes wrong between members comes as a RuntimeError of torch's."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBroken(str(error)) from error


def _gloo(keys: Any, formation: Formation, timeout: timedelta, host: str) -> Any:
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]  # the address that the others reach
    options._timeout = timeout
    return distributed.ProcessGroupGloo(keys, formation.rank, formation.world, options)


def _nccl(keys: Any, formation: Formation, timeout: timedelta) -> Any:
    """NCCL finds its addresses itself, and ends a process in which a call hangs."""
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(keys, formation.rank, formation.world, options)


def _pack(state: Any) -> Tensor:
    """The state as uint8 [bytes]."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
