"""The processes of one learner: ranks 0 to W−1, and what they share.

Two ways lead from one to another. Rank 0's orders, and whatever goes with them, travel over a channel of their own on
the CPU; gradients and shards over torch's default group, NCCL on GPUs and Gloo on CPUs. Both find together through a
key-value store that rank 0 serves on a free port, so a group that starts anew shares nothing with the one before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
from torch import Tensor, distributed

from app.learning.gathering import Formation
from app.learning.gradients import Group, GroupBroken

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that say over which network torch's default group talks."""
FROM_GLOO = "gloo/"
"""In the text of every error of Gloo's, which is a plain RuntimeError: the file that it comes from."""


@dataclass(frozen=True)
class Place:
    """One process in its group."""

    rank: int
    world: int
    host: str
    """This process' own address, as the others reach it."""
    store_host: str
    store_port: int
    """Of the key-value store that rank 0 serves."""


class Ranks:
    """The group as one of its processes has it. All of them make the same calls, in the same order, from one thread."""

    def __init__(self, place: Place, sharded: bool, cuda: bool, timeout_s: float):
        """Raises GroupBroken when the others do not come within `timeout_s`."""
        self.rank, self.world, self.sharded, self.cuda = place.rank, place.world, sharded, cuda
        self._patience_s = timeout_s
        _announce(place)
        formation = Formation("orders", place.rank, place.world, place.store_host, place.store_port, source=0)
        self._orders = Group(formation, place.host, torch.device("cpu"), timeout_s)
        with group_errors():
            timeout = timedelta(seconds=timeout_s)
            store = distributed.TCPStore(place.store_host, place.store_port, is_master=False, timeout=timeout)
            distributed.init_process_group(
                "nccl" if cuda else "gloo",
                store=distributed.PrefixStore("gradients", store),
                rank=place.rank,
                world_size=place.world,
                timeout=timeout,
            )

    @property
    def patience_s(self) -> float:
        """For how long the others may be late, in every call."""
        return self._patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        if seconds != self._patience_s:
            self._patience_s = seconds
            distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))  # gradients wait as long

    def broadcast(self, tensor: Tensor) -> None:
        """Make a tensor on the CPU what it is on rank 0. Raises GroupBroken, as all of these."""
        self._orders.broadcast(tensor, self._patience_s)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor on the CPU to a rank that receives it now."""
        self._orders.send(tensor, rank, self._patience_s)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Make a contiguous tensor on the CPU what a rank sends."""
        self._orders.receive(tensor, rank, self._patience_s)

    def mean(self, value: float) -> float:
        """The mean of a number over all ranks, the same bits on each."""
        total = torch.tensor([value], dtype=torch.float64)
        self._orders.add_up(total, self._patience_s)
        return float(total) / self.world


@contextmanager
def group_errors() -> Iterator[None]:
    """What goes wrong between ranks, wherever it comes up in a step, becomes GroupBroken; other errors stay."""
    try:
        yield
    except GroupBroken:
        raise
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or FROM_GLOO in str(error):
            raise GroupBroken(str(error)) from error
        raise


def _announce(place: Place) -> None:
    """Tell accelerate, by the environment. A process sees no GPUs but its own, so its device is the 0th."""
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(place.world)}
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world), **local)
    interface = _interface_of(place.host)
    for name in INTERFACES:
        if interface is not None:
            os.environ.setdefault(name, interface)


def _interface_of(host: str) -> str | None:
    """The network interface that has an address."""
    found = (name for name, own in psutil.net_if_addrs().items() if any(one.address == host for one in own))
    return next(found, None)
