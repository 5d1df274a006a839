"""Whole runs in stepped mode, against an independent float64 version of the algorithm."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from app.diloco.agenda import Pace
from app.diloco.codec import digest
from app.diloco.fragments import gather
from app.diloco.process import Body, SteppedLearner
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from app.diloco.stepped import SteppedFleet
from tests.unit.tiny import SPECS, restored, tiny_layout, tiny_parameters, tiny_state

RATE = 0.1
TOKENS = (8, 24, 8, 16, 40)
Arrays = dict[str, np.ndarray]


def puller(m: int, pace: Pace) -> SteppedLearner:
    """A learner whose inner step moves toward its own target."""
    target = tiny_parameters(10 + m)

    def inner_step(replica: Replica, _: int) -> float:
        with replica.writing(TOKENS[m]):
            for name, tensor in replica._weights.tensors.items():
                tensor += RATE * (target[name] - tensor)
        return 0.0

    return SteppedLearner(f"l{m}", lambda: Body(tiny_parameters(99), inner_step), pace)


def fleet_at(paces: Sequence[Pace], dials: dict[str, Any], **schedule: Any) -> SteppedFleet:
    settings = DilocoSettings(**({"fragments": 3, "sync_interval": 6} | dials))
    protocol = restored(settings, tiny_state(settings), [], 1, 10**9)
    return SteppedFleet(protocol, [puller(m, pace) for m, pace in enumerate(paces)], **schedule)


def fleet_of(learners: int, **dials: Any) -> SteppedFleet:
    """In lockstep, without delays."""
    return fleet_at([Pace()] * learners, dials)


def theta_of(fleet: SteppedFleet) -> np.ndarray:
    return np.concatenate([f.theta.numpy() for f in fleet.protocol.fragments]).astype(np.float64)


# ---- the reference


class Reference:
    """The algorithm of `docs/algorithm.md` in float64, learners in step, all of them in every merge."""

    def __init__(self, learners: int, settings: DilocoSettings):
        self.s, self.M = settings, learners
        self.layout = tiny_layout(settings.fragments)
        first = {k: v.numpy().astype(np.float64) for k, v in tiny_parameters(0).items()}
        self.theta = [self.flat(p, first) for p in range(settings.fragments)]
        self.momentum = [np.zeros_like(x) for x in self.theta]
        self.local = [{k: v.copy() for k, v in first.items()} for _ in range(learners)]
        self.target = [
            {k: v.numpy().astype(np.float64) for k, v in tiny_parameters(10 + m).items()} for m in range(learners)
        ]
        self.base = [[x.copy() for x in self.theta] for _ in range(learners)]
        self.counts = np.zeros((learners, settings.fragments, 2), dtype=np.int64)  # steps, tokens
        self.pending: list[tuple[int, int, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]] = []

    def rows(self, piece: Any) -> Any:
        return slice(piece.start_row, piece.stop_row) if piece.shape else ...

    def flat(self, p: int, arrays: Arrays) -> np.ndarray:
        pieces = self.layout.fragments[p].pieces
        return np.concatenate([arrays[piece.name][self.rows(piece)].ravel() for piece in pieces])

    def write(self, p: int, m: int, value: np.ndarray) -> None:
        offset = 0
        for piece in self.layout.fragments[p].pieces:
            part = value[offset : offset + piece.numel].reshape(piece.shape)
            self.local[m][piece.name][self.rows(piece)] = part
            offset += piece.numel

    def merge(self, p: int, vs: list[np.ndarray], w: np.ndarray) -> np.ndarray:
        out, offset = np.empty_like(vs[0]), 0
        w = w / w.sum()
        for piece in self.layout.fragments[p].pieces:
            at = slice(offset, offset + piece.numel)
            parts = [v[at] for v in vs]
            mean = sum(wi * x for wi, x in zip(w, parts, strict=True))
            norms = np.array([np.linalg.norm(x) for x in parts])
            if piece.name != "emb" and norms.min() > 0:
                direction = sum(wi * x / n for wi, x, n in zip(w, parts, norms, strict=True))
                length = np.linalg.norm(direction)
                if length >= self.s.rda_threshold:
                    mean = direction / length * (w @ norms)
            out[at] = mean
            offset += piece.numel
        return out

    def tick(self, t: int) -> None:
        for m in range(self.M):
            for k, x in self.local[m].items():
                x += RATE * (self.target[m][k] - x)
            self.counts[m, :, 0] += 1
            self.counts[m, :, 1] += TOKENS[m]
        for p in range(self.s.fragments):
            if t % self.s.sync_interval == p * self.s.sync_interval // self.s.fragments:
                self.outer(p, t)
        for due, p, theta, captured in [x for x in self.pending if x[0] <= t]:
            self.pending = [x for x in self.pending if x[:2] != (due, p)]
            for m in range(self.M):
                self.adopt(p, m, theta, *captured[m])

    def outer(self, p: int, t: int) -> None:
        d = [self.flat(p, self.local[m]) - self.base[m][p] for m in range(self.M)]
        steps, tokens = self.counts[:, p, 0].astype(np.float64), self.counts[:, p, 1].astype(np.float64)
        v = self.merge(p, [-x for x in d], tokens * tokens / steps)
        self.momentum[p] = self.s.outer_momentum * self.momentum[p] + v
        self.theta[p] = self.theta[p] - self.s.outer_lr * (v + self.s.outer_momentum * self.momentum[p])
        captured = [(d[m], self.counts[m, p].copy()) for m in range(self.M)]
        self.pending.append((t + self.s.overlap_steps, p, self.theta[p].copy(), captured))

    def adopt(self, p: int, m: int, theta: np.ndarray, d: np.ndarray, captured: np.ndarray) -> None:
        rest = self.counts[m, p] - captured
        now = self.flat(p, self.local[m])
        if self.s.adopt == "rebase":
            self.write(p, m, theta + now - self.base[m][p] - d)
        elif self.s.adopt == "mix":
            self.write(p, m, self.s.mix_alpha * now + (1 - self.s.mix_alpha) * theta)
            tokens = int(np.floor(self.s.mix_alpha * rest[1]))
            rest = np.array([int(np.ceil(self.s.mix_alpha * rest[0])) if tokens else 0, tokens])
        else:
            self.write(p, m, theta)
            rest = np.zeros(2, dtype=np.int64)
        self.base[m][p], self.counts[m, p] = theta, rest


@pytest.mark.parametrize("learners", [1, 2, 5])
@pytest.mark.parametrize("adopt", ["overwrite", "mix", "rebase"])
@pytest.mark.parametrize("tau", [0, 2, 5])
def test_a_run_equals_the_reference(learners: int, adopt: str, tau: int) -> None:
    # With τ = 0 there is no window, so the quorum must be everybody.
    dials = {"overlap_steps": tau, "min_quorum": learners, "mix_alpha": 0.25, "outer_lr": 0.4, "outer_momentum": 0.6}
    fleet = fleet_of(learners, adopt=adopt, guard_z=0.0, **dials)
    reference = Reference(learners, fleet.protocol.settings)
    for t in range(1, 61):
        fleet.advance()
        reference.tick(t)
    assert [f.version for f in fleet.protocol.fragments] == [10, 10, 10]
    want = np.concatenate(reference.theta)
    assert np.linalg.norm(theta_of(fleet) - want) <= 1e-5 * np.linalg.norm(want)
    for m in range(learners):
        mine = fleet.replicas[f"l{m}"]._weights.tensors
        for spec in SPECS:
            want = reference.local[m][spec.name]
            assert np.linalg.norm(mine[spec.name].numpy() - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize(("adopt", "tau"), [("overwrite", 0), ("rebase", 0), ("rebase", 2)])
def test_one_learner_with_a_plain_outer_step_stays_where_it_is(adopt: str, tau: int) -> None:
    fleet = fleet_of(1, adopt=adopt, overlap_steps=tau, outer_lr=1.0, outer_momentum=0.0)
    alone = {k: v.double() for k, v in tiny_parameters(0).items()}
    target = {k: v.double() for k, v in tiny_parameters(10).items()}
    for _ in range(60):
        fleet.advance()
        for name, tensor in alone.items():
            tensor += RATE * (target[name] - tensor)
    assert fleet.protocol.merges == 30
    for name, tensor in fleet.replicas["l0"]._weights.tensors.items():
        assert float((tensor.double() - alone[name]).norm()) <= 1e-6 * max(1.0, float(alone[name].norm()))


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("adopt", ["overwrite", "mix", "rebase"])
def test_all_hold_the_same_bits_after_adoption(codec: str, adopt: str) -> None:
    fleet = fleet_of(3, codec_down=codec, codec_up=codec, adopt=adopt)
    for _ in range(40):
        fleet.advance()
        for replica in fleet.replicas.values():
            for held, fragment in zip(replica.fragments, fleet.protocol.fragments, strict=True):
                if held.version == fragment.version:
                    assert digest(held.base) == fragment.digest
                    assert torch.equal(held.base, fragment.theta_hat)
    assert fleet.protocol.merges > 10


@pytest.mark.parametrize("late", ["merge", "discard"])
@pytest.mark.parametrize("adopt", ["overwrite", "mix", "rebase"])
@pytest.mark.parametrize("tau", range(6))
def test_the_fates_balance_at_every_step(adopt: str, tau: int, late: str) -> None:
    fleet = fleet_of(3, adopt=adopt, late=late, overlap_steps=tau, sync_interval=4)
    for _ in range(30):
        fleet.advance()
        balance = fleet.protocol.books.balance()
        assert balance.exact
        assert balance.processed == fleet.protocol.books.tokens * fleet.protocol.layout.numel
        for name, replica in fleet.replicas.items():
            account = fleet.protocol.books.account(name, 1)
            assert account is not None
            for p, held in enumerate(replica.fragments):
                assert account.outstanding(p) >= 0
                if held.version == fleet.protocol.fragments[p].version:
                    gone = sum(held.discarded.values())
                    assert replica.tokens == account.merged[p] + gone + held.outstanding
    fleet.finish()
    balance = fleet.protocol.books.balance()
    assert (balance.exact, balance.outstanding) == (True, 0)
    assert balance.merged > 0
    if adopt == "rebase":
        assert balance.merged == balance.processed  # nobody died, so everything counts in the end
        assert balance.discarded == {}


def test_the_last_round_takes_what_is_left() -> None:
    fleet = fleet_of(2, overlap_steps=2)
    for _ in range(7):
        fleet.advance()
    merged = fleet.protocol.books.balance().merged
    fleet.finish()
    assert fleet.protocol.ended
    assert fleet.protocol.books.balance().merged > merged
    assert [note.kind for note in fleet.notes][-1] == "ended"


def test_a_run_is_deterministic() -> None:
    def digests() -> list[str]:
        fleet = fleet_of(3, codec_down="bf16", adopt="mix")
        for _ in range(30):
            fleet.advance()
        return [f.digest for f in fleet.protocol.fragments]

    assert digests() == digests()


def test_an_offer_is_adopted_tau_steps_after_its_capture() -> None:
    fleet = fleet_of(2, fragments=1, sync_interval=6, overlap_steps=2)
    versions = []
    for _ in range(9):
        fleet.advance()
        versions.append(fleet.replicas["l0"].fragments[0].version)
    assert versions == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_with_keep_the_global_model_follows_weights_that_all_share() -> None:
    """As in data parallel: every learner makes the same steps, the merges change none of them."""
    dials: dict[str, Any] = {
        "adopt": "keep",
        "late": "discard",
        "merge": "mean",
        "outer": "sgd",
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
    }
    settings = DilocoSettings(fragments=3, sync_interval=6, guard_z=0.0, **dials)
    protocol = restored(settings, tiny_state(settings), [], 1, 10**9)
    fleet = SteppedFleet(protocol, [replace(puller(0, Pace()), name=f"l{m}") for m in range(3)])
    lone = tiny_parameters(0)
    for _ in range(40):
        fleet.advance()
        for name, tensor in lone.items():
            tensor += RATE * (tiny_parameters(10)[name] - tensor)
    for replica in fleet.replicas.values():
        assert all(torch.equal(tensor, lone[name]) for name, tensor in replica._weights.tensors.items())
    fleet.finish()
    layout = fleet.protocol.layout
    want = torch.cat([gather(fragment, lone) for fragment in layout.fragments]).numpy().astype(np.float64)
    assert np.linalg.norm(theta_of(fleet) - want) <= 1e-6 * np.linalg.norm(want)
    balance = fleet.protocol.books.balance()
    assert balance.exact
    assert balance.merged == balance.processed
