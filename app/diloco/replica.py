"""The learner's side of the protocol: what it holds of each fragment, what it gives, what it adopts.

It knows tensors and counters, not how messages travel. One thread may step and adopt while another captures and
receives: whatever reads or writes parameters or counters holds `lock` for as long as a copy takes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from app.diloco.codec import digest, get_codec, payload_digest
from app.diloco.feedback import feedback_for
from app.diloco.fragments import Layout, gather, scatter_
from app.diloco.held import Held
from app.diloco.merge import finite_norm
from app.diloco.messages import Ask, Contribution, CutId, Offer, Report, Sender, Welcome
from app.diloco.settings import DilocoSettings
from app.diloco.whole import is_welcome


@dataclass(frozen=True)
class Received:
    """A decoded offer that waits for the next step boundary."""

    offer: Offer
    theta_hat: torch.Tensor


class Replica:
    """All fragments of one learner, its clock and its counters."""

    def __init__(
        self, layout: Layout, settings: DilocoSettings, parameters: Mapping[str, torch.Tensor], welcome: Welcome
    ):
        self.lock = threading.RLock()
        self._layout = layout
        self._settings = settings
        self._parameters = parameters
        self._codec = get_codec(settings.codec_up, settings.codec_block)
        get_codec(settings.codec_down, settings.codec_block)  # its kernels are compiled before the first step
        self.sender: Sender = welcome.sender
        self.clock = welcome.clock
        self.steps = 0
        self.tokens = 0
        self.samples = 0
        self.seq = 0
        self.cut_taken: CutId | None = None
        self.cut_saved: CutId | None = None
        self.leaving = False
        """Tell the syncer that nothing more comes: it takes what there is, and lets this learner go."""
        self._heard = 0
        self._inbox: dict[int, Received] = {}
        self._need_full: set[int] = set()
        self.fragments: list[Held] = []
        if not is_welcome(welcome, len(layout.fragments)):
            raise ValueError("what came as a welcome is none for this model")
        for offer in sorted(welcome.offers, key=lambda o: o.fragment):
            theta_hat = _full(offer, layout.fragments[offer.fragment].numel)
            if theta_hat is None:
                raise ValueError(f"fragment {offer.fragment} arrived damaged in the welcome")
            scatter_(layout.fragments[offer.fragment], theta_hat, parameters)
            self.fragments.append(Held(offer.version, theta_hat, offer.clock, feedback=feedback_for(settings)))

    @contextmanager
    def writing(self, tokens: int, samples: int = 0) -> Iterator[None]:
        """Hold this while the optimizer writes the parameters of one inner step: its counters rise with it.

        `samples` of the step are counted where a ledger leases them.
        """
        with self.lock:
            yield
            self.clock += 1
            self.steps += 1
            self.tokens += tokens
            self.samples += samples
            for held in self.fragments:
                held.step(tokens)

    def clocks(self) -> tuple[int, list[int]]:
        """Its own clock, and for each fragment the global clock at which the adopted version was made."""
        with self.lock:
            return self.clock, [held.clock for held in self.fragments]

    def skip_step(self, samples: int = 0) -> None:
        """An inner step that wrote nothing (its gradient was not finite): the clock rises, and its samples are gone."""
        with self.lock:
            self.clock += 1
            self.samples += samples

    # ---- giving

    def report(self, step_time: float, loss: float, idle: bool) -> Report:
        """The counters now."""
        with self.lock:
            self.seq += 1
            return Report(
                sender=self.sender,
                seq=self.seq,
                heard=self._heard,
                clock=self.clock,
                steps=self.steps,
                tokens=self.tokens,
                step_time=step_time,
                loss=loss,
                held=tuple(self._newest(p) for p in range(len(self.fragments))),
                discarded=tuple(dict(held.discarded) for held in self.fragments),
                outstanding=tuple(held.outstanding for held in self.fragments),
                idle=idle,
                leaving=self.leaving,
                need_full=tuple(sorted(self._need_full)),
                samples=self.samples,
                cut_taken=self.cut_taken,
                cut_saved=self.cut_saved,
            )

    def _newest(self, p: int) -> int:
        """Newest version of fragment p received."""
        waiting = self._inbox.get(p)
        return waiting.offer.version if waiting else self.fragments[p].version

    def hear(self, epoch: int, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
        """Note a syncer's new epoch and the newest round heard of; returns the asks to answer.

        None of a syncer that was replaced, and none twice: two captures for one round could not be told apart.
        """
        with self.lock:
            if epoch > self.sender.epoch:
                self.sender = replace(self.sender, epoch=epoch)
                self._heard = 0
            new = tuple(ask for ask in asks if ask.epoch == self.sender.epoch and ask.round > self._heard)
            self._heard = max([self._heard, *(ask.round for ask in new)])
            return new

    def contribute(self, ask: Ask, step_time: float, loss: float, idle: bool) -> Contribution:
        """Answer an ask that `hear` returned with d = encode(θ − Θ̂_base) and the counters of this moment.

        With error feedback what earlier encodings left out is added (`feedback.py`). Only the copy happens under
        the lock; encoding does not hold up a step.
        """
        p = ask.fragment
        with self.lock:
            held = self.fragments[p]
            base_version = held.version
            delta = gather(self._layout.fragments[p], self._parameters) - held.base
            if held.feedback is not None:
                delta = held.feedback.wanted(delta)
            capture = held.capture(ask)
            report = self.report(step_time, loss, idle)
        payload = self._codec.encode(delta)
        if self._settings.adopt == "rebase":
            capture.delta = self._codec.decode(payload, delta.numel())
        if held.feedback is not None:
            capture.residue = delta - self._codec.decode(payload, delta.numel())
        return Contribution(
            sender=replace(report.sender, epoch=ask.epoch),
            fragment=p,
            round=ask.round,
            base_version=base_version,
            c_steps=capture.c_steps,
            c_tokens=capture.c_tokens,
            codec=self._codec.name,
            payload=payload,
            digest=payload_digest(payload),
            report=report,
        )

    # ---- receiving

    def receive(self, offer: Offer) -> bool:
        """Decode an offer for the next step boundary; False when it is old, or when it can't be read.

        One of a wrong size or digest makes the next reports ask for the full fragment; the syncer ends a learner that
        can't read that either, again and again. One thread at a time receives.
        """
        p = offer.fragment
        with self.lock:
            waiting = self._inbox.get(p)
            newest = self._newest(p)
            value = waiting.theta_hat if waiting else self.fragments[p].base
            stale = offer.version <= newest or offer.epoch < self.sender.epoch
        if stale or offer.base_version not in (None, newest):
            return False
        theta_hat = self._decode(offer, newest, value)
        with self.lock:
            if theta_hat is None:
                self._need_full.add(p)
                return False
            self._need_full.discard(p)
            self._inbox[p] = Received(_with_older(offer, self._inbox.get(p)), theta_hat)
        return True

    def _decode(self, offer: Offer, newest: int, value: torch.Tensor) -> torch.Tensor | None:
        """Θ̂ at the offer's version, fp32 [numel]; None when it is not what its digest says.

        `value` is Θ̂ at version `newest`.
        """
        numel = value.numel()
        if offer.base_version is None:
            return _full(offer, numel)
        codec = get_codec(self._settings.codec_down, self._settings.codec_block)
        versions = offer.version - newest
        if offer.codec != codec.name or offer.payload.size != versions * codec.nbytes(numel):
            return None
        for change in offer.payload.reshape(versions, codec.nbytes(numel)):
            value = codec.decode(change, numel).add_(value)
        return value if digest(value) == offer.digest else None

    def adopt(self, fragments: Collection[int] | None = None) -> list[int]:
        """At a step boundary: adopt what has arrived (of these fragments only, if given). Returns the fragments."""
        with self.lock:
            adopted = sorted(p for p in self._inbox if fragments is None or p in fragments)
            for p in adopted:
                self._adopt(self._inbox.pop(p))
        return adopted

    def _adopt(self, received: Received) -> None:
        """`overwrite` θ ← Θ̂, `mix` θ ← αθ + (1−α)Θ̂, `rebase` θ ← Θ̂ + progress that the merge did not contain, `keep` θ.

        Overwrite, whatever the rule, where the learner's values are not finite or the syncer called them outliers.
        Counters and fates: `docs/protocol.md`, Adoption and the fate of work.
        """
        offer, value = received.offer, received.theta_hat
        held = self.fragments[offer.fragment]
        fragment = self._layout.fragments[offer.fragment]
        rule = "overwrite" if offer.restart else self._settings.adopt
        if rule != "overwrite":
            mine = gather(fragment, self._parameters)
            if not finite_norm(mine):  # it would stay for ever, and be refused by every round
                rule = "overwrite"
        match rule:
            case "rebase":
                progress = mine - held.base
                contained = held.rebase(offer)
                if contained is not None:
                    assert contained.delta is not None  # it was sent, so it was encoded
                    progress -= contained.delta
                value = received.theta_hat + progress
            case "keep":
                value = mine
                held.rebase(offer)
            case "mix":
                alpha = self._settings.mix_alpha
                value = alpha * mine + (1 - alpha) * received.theta_hat
                held.restart(offer, alpha)
            case _:
                held.restart(offer, 0.0)
        scatter_(fragment, value, self._parameters)
        held.version, held.base, held.clock = offer.version, received.theta_hat, offer.clock
        self.clock = max(self.clock, offer.clock)


def _full(offer: Offer, numel: int) -> torch.Tensor | None:
    """Θ̂ of a full fragment, fp32 [numel]; None when it is not what its digest says."""
    codec = get_codec("fp32")
    if offer.codec != codec.name or offer.payload.size != codec.nbytes(numel):
        return None
    theta_hat = codec.decode(offer.payload, numel)
    return theta_hat if digest(theta_hat) == offer.digest else None


def _with_older(offer: Offer, waiting: Received | None) -> Offer:
    """The newer offer, with what the one it replaces in the inbox said of this learner's own work."""
    if waiting is None:
        return offer
    known = {(c.epoch, c.round) for c in offer.contains}
    older = tuple(c for c in waiting.offer.contains if (c.epoch, c.round) not in known)
    return replace(offer, contains=(*older, *offer.contains), restart=offer.restart or waiting.offer.restart)
