"""One merge as a value: everything a round decided, ready to be computed anywhere and any number of times."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.diloco.average import average_weight, averaged
from app.diloco.codec import Codec, digest, get_codec, payload_digest
from app.diloco.fragments import Fragment, Layout
from app.diloco.merge import finite_norm, merge_fragment, token_weight
from app.diloco.messages import Contained, Contribution, Payload
from app.diloco.outer import outer_step
from app.diloco.settings import DilocoSettings


@dataclass(frozen=True)
class Answer:
    """A contribution that a round took; `delta` is its decoded d = θ − Θ̂_base, fp32 [numel]."""

    contribution: Contribution
    delta: torch.Tensor
    arrived_at: float

    @property
    def weight(self) -> float:
        """w = c_tokens · (c_tokens / c_steps), 0 without a step (`docs/algorithm.md`, syncer 4)."""
        return token_weight(self.contribution.c_tokens, self.contribution.c_steps)

    @property
    def tokens_per_step(self) -> float:
        """c_tokens / c_steps; 0 without a step."""
        return self.contribution.c_tokens / self.contribution.c_steps if self.contribution.c_steps else 0.0


@dataclass(frozen=True)
class MergeResult:
    """Version `version` of a fragment and what it is made of. Tensors are fp32 [numel] and never written again."""

    fragment: int
    round: int
    version: int
    epoch: int
    clock: int
    theta: torch.Tensor
    theta_hat: torch.Tensor
    momentum: torch.Tensor
    average: torch.Tensor
    share: float | None
    """Of a last round that took the mean: that of its job."""
    change: Payload | None
    """The encoded step from the Θ̂ before; None with an fp32 down codec, where Θ̂ = Θ."""
    digest: str
    contains: tuple[Contained, ...]

    @property
    def last(self) -> bool:
        """Whether it is of a last round that took the mean."""
        return self.share is not None


@dataclass(frozen=True)
class MergeJob:
    """Inputs of the merge that makes version `version` of a fragment. `answers` are in learner-id order."""

    fragment: Fragment
    layout: Layout
    settings: DilocoSettings
    epoch: int
    round: int
    version: int
    clock: int
    clock_before: int
    """Global clock of the version it starts from."""
    theta: torch.Tensor
    theta_hat: torch.Tensor
    momentum: torch.Tensor
    average: torch.Tensor
    answers: tuple[Answer, ...]
    share: float | None = None
    """Of a last round that takes the mean: the share of the asked learners that gave something. None of all others."""

    def run(self) -> MergeResult:
        """Merge, take the outer step, encode the offer (`docs/algorithm.md`, syncer 4 to 8).

        A last round that takes the mean has no outer step: Θ becomes the mean of the learners' weights, where whoever
        gave nothing counts as one that has Θ, and the momentum stays. Each weighs as the tokens of its steps: how long
        ago it was merged for the last time says nothing about its weights.
        """
        last = self.share is not None
        weights = [answer.tokens_per_step if last else answer.weight for answer in self.answers]
        outer_grads = [-answer.delta for answer in self.answers]  # v = −decode(d)
        theta, momentum = self._step(outer_grads, weights)
        codec = get_codec(self.settings.codec_down, self.settings.codec_block)
        theta_hat, change = chain(self.theta_hat, theta, codec)
        weight = average_weight(self.settings, self.clock_before, self.clock, last)
        return MergeResult(
            fragment=self.fragment.index,
            round=self.round,
            version=self.version,
            epoch=self.epoch,
            clock=self.clock,
            theta=theta,
            theta_hat=theta_hat,
            momentum=momentum,
            average=averaged(self.average, theta, weight),
            share=self.share,
            change=change,
            digest=digest(theta_hat),
            contains=tuple(
                contained_in(answer, self.version, weight) for answer, weight in zip(self.answers, weights, strict=True)
            ),
        )

    def _step(self, outer_grads: list[torch.Tensor], weights: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """(Θ, b) of the new version."""
        s = self.settings
        rule = s.merge if self.share is None else "mean"
        grad = merge_fragment(self.fragment, self.layout, outer_grads, weights, rule, s.rda_threshold)
        if self.share is None:
            return outer_step(s.outer, self.theta, self.momentum, grad, s.outer_lr, s.outer_momentum)
        theta, _ = outer_step("sgd", self.theta, torch.zeros_like(self.theta), grad, self.share, 0.0)
        return theta, self.momentum


def chain(theta_hat: torch.Tensor, theta: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, Payload | None]:
    """Θ̂ᵥ₊₁ = Θ̂ᵥ + decode(encode(Θᵥ₊₁ − Θ̂ᵥ)): the encoding error is carried into the next change.

    Returns the new Θ̂ and the encoded change; with an fp32 codec Θ̂ is Θ and there is no change to send.
    """
    if codec.name == "fp32":
        return theta, None
    change = codec.encode(theta - theta_hat)
    return codec.decode(change, theta.numel()).add_(theta_hat), change


def contained_in(answer: Answer, version: int, weight: float) -> Contained:
    """The entry that says: this version holds this contribution."""
    given = answer.contribution
    return Contained(
        learner=given.sender.learner,
        incarnation=given.sender.incarnation,
        epoch=given.sender.epoch,
        round=given.round,
        base=given.base_version,
        version=version,
        c_steps=given.c_steps,
        c_tokens=given.c_tokens,
        weight=weight,
        samples=given.report.samples,
    )


def decode_contribution(contribution: Contribution, numel: int, codec: Codec) -> torch.Tensor | None:
    """The decoded d, fp32 [numel], or None when the payload is garbage (codec, size, digest, NaN, Inf).

    `codec` is the run's: replay would read another one's bytes wrong. The size is looked at first, so that nothing is
    hashed or allocated for what is too long. ‖d‖² must be finite in fp32 too: what is larger would overflow in the
    outer step and poison Θ.
    """
    payload = contribution.payload
    if contribution.codec != codec.name or payload.size != codec.nbytes(numel):
        return None
    if payload_digest(payload) != contribution.digest:
        return None
    delta = codec.decode(payload, numel)
    return delta if finite_norm(delta) else None
