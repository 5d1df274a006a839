"""What a learner trains, as the protocol sees it: fragments that are read and written one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from app.diloco.fragments import Fragment, gather, scatter_


class Weights(Protocol):
    """Reads and writes the trained parameters by fragment, wherever they lie."""

    def gather(self, fragment: Fragment) -> Tensor:
        """A copy of the fragment, fp32 [numel] on the CPU."""

    def scatter(self, fragment: Fragment, flat: Tensor) -> None:
        """Write the fragment, fp32 [numel]."""


class NamedTensors:
    """Parameters that lie whole in this process."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors

    def gather(self, fragment: Fragment) -> Tensor:
        """A copy of the fragment (`fragments.gather`)."""
        return gather(fragment, self.tensors)

    def scatter(self, fragment: Fragment, flat: Tensor) -> None:
        """Write the fragment (`fragments.scatter_`)."""
        scatter_(fragment, flat, self.tensors)


def weights_of(parameters: Weights | Mapping[str, Tensor]) -> Weights:
    """Named tensors as weights; what is that already stays as it is."""
    return NamedTensors(parameters) if isinstance(parameters, Mapping) else parameters
