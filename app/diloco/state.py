"""The global model: every fragment's value, what is offered of it, its momentum, version and ring."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from app.diloco.codec import digest as digest_of
from app.diloco.codec import get_codec
from app.diloco.job import MergeResult
from app.diloco.messages import Contained, Offer
from app.diloco.ring import Ring
from app.diloco.settings import DilocoSettings


@dataclass
class GlobalFragment:
    """One fragment of the global model. Tensors are fp32 [numel] on the CPU, replaced and never written in place."""

    index: int
    version: int
    clock: int
    """Global clock t when this version was made."""
    theta: torch.Tensor
    theta_hat: torch.Tensor
    momentum: torch.Tensor
    average: torch.Tensor
    """Θ̄: the model to evaluate and export (`average.py`)."""
    ring: Ring
    change_codec: str
    """Codec of the changes in the ring."""
    digest: str
    last_merged: dict[str, int] = field(default_factory=dict)
    """Learner → newest version that holds its living incarnation's work."""
    contained: dict[str, list[Contained]] = field(default_factory=dict)
    """Learner → entries of versions that it has not received yet."""
    outliers: dict[str, int] = field(default_factory=dict)
    """Learner → version at which its work was refused as an outlier; until it has received a newer one."""

    @classmethod
    def restored(
        cls,
        index: int,
        version: int,
        clock: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        settings: DilocoSettings,
    ) -> GlobalFragment:
        """A fragment from its Θ, Θ̂, momentum and Θ̄, with a ring that holds this version alone."""
        ring = Ring(settings.ring_versions)
        ring.push(version, None)
        return cls(index, version, clock, *tensors, ring, settings.codec_down, digest_of(tensors[1]))

    def apply(self, result: MergeResult) -> None:
        """The next version. Raises ValueError when `result` is another one."""
        if result.version != self.version + 1:
            raise ValueError(f"fragment {self.index}: {result.version} cannot follow version {self.version}")
        self.ring.push(result.version, result.change)
        tensors = (result.theta, result.theta_hat, result.momentum, result.average)
        self.take(result.version, result.clock, tensors, result.digest)

    def take(
        self,
        version: int,
        clock: int,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        digest: str,
    ) -> None:
        """Anchor, version, momentum and average change together."""
        self.version, self.clock, self.digest = version, clock, digest
        self.theta, self.theta_hat, self.momentum, self.average = tensors

    def note_contained(self, entry: Contained) -> None:
        """This version holds that contribution of a living incarnation."""
        self.last_merged[entry.learner] = entry.version
        self.contained.setdefault(entry.learner, []).append(entry)

    def forget(self, learner: str) -> None:
        """This incarnation has left: its next one starts with a clean slate."""
        self.last_merged.pop(learner, None)
        self.contained.pop(learner, None)
        self.outliers.pop(learner, None)

    def received(self, learner: str, version: int) -> None:
        """This learner has every version up to `version`: its older entries are not needed again."""
        if entries := self.contained.get(learner):
            self.contained[learner] = [entry for entry in entries if entry.version > version]
        if self.outliers.get(learner, version) < version:
            del self.outliers[learner]

    def offer_for(self, learner: str, held: int, epoch: int, full: bool) -> Offer:
        """The newest value for a learner that holds `held`: the missing changes, or all of it where that is smaller."""
        changes = None if full else self.ring.changes(held)
        whole = get_codec("fp32")
        if changes and sum(change.size for change in changes) < whole.nbytes(self.theta_hat.numel()):
            codec, base, payload = self.change_codec, held, np.concatenate(changes)
        else:
            codec, base, payload = whole.name, None, whole.encode(self.theta_hat)
        return Offer(
            fragment=self.index,
            version=self.version,
            epoch=epoch,
            clock=self.clock,
            base_version=base,
            codec=codec,
            payload=payload,
            digest=self.digest,
            contains=tuple(e for e in self.contained.get(learner, ()) if e.version > held),
            restart=learner in self.outliers,
        )
