"""The optimizer state on its way from one learner to another."""

import contextlib

import pytest
import torch

from app.config import load
from app.learning.inner import InnerLoop
from app.learning.model import build_model
from app.learning.moments import Unusable, packed

VOCAB, SEQ = 257, 16


def loop(optimizer: str, hidden: int = 32) -> InnerLoop:
    config = load(["model=micro", f"model.hidden={hidden}", f"train.optimizer={optimizer}", f"data.seq_len={SEQ}"])
    return InnerLoop(build_model(config.model, VOCAB, SEQ, seed=1), config.train)


def steps(trained: InnerLoop, count: int, seed: int = 0) -> None:
    chance = torch.Generator().manual_seed(seed)
    for _ in range(count):
        batch = torch.randint(0, VOCAB, (2, SEQ), generator=chance)
        trained.step([batch], 1e-3, contextlib.nullcontext())


def weights(trained: InnerLoop) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trained.parameters]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loop_with_anothers_weights_and_moments_goes_on_bit_for_bit(optimizer: str) -> None:
    donor, joiner = loop(optimizer), loop(optimizer)
    steps(donor, 3)
    joiner.take_moments(packed(donor.moments()))
    with torch.no_grad():
        for mine, theirs in zip(joiner.parameters, donor.parameters, strict=True):
            mine.copy_(theirs)
    steps(donor, 3, seed=1)
    steps(joiner, 3, seed=1)
    assert all(map(torch.equal, weights(joiner), weights(donor)))


def test_a_copy_is_of_its_moment() -> None:
    donor = loop("adamw")
    steps(donor, 2)
    copy = donor.moments()
    before = packed(copy)
    steps(donor, 2)
    assert packed(copy) == before != packed(donor.moments())


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    joiner, other = loop("adamw"), loop("adamw")
    steps(joiner, 2)
    steps(other, 2, seed=5)
    good = packed(other.moments())
    bad = other.moments()
    bad[0]["state"][0]["exp_avg"][0, 0] = float("nan")
    half = other.moments()
    del half[0]["state"][0]
    lacking = other.moments()
    del lacking[0]["state"][0]["step"]
    before = packed(joiner.moments())
    larger, muon = loop("adamw", hidden=64), loop("muon")
    steps(larger, 1)
    steps(muon, 1)
    for data in (
        b"",
        b"garbage",
        good[:-1],
        good[: len(good) // 2],
        packed(bad),
        packed(half),
        packed(lacking),
        packed(larger.moments()),
    ):
        with pytest.raises(Unusable):
            joiner.take_moments(data)
    for data in (packed(muon.moments()), packed(loop("adamw").moments())):
        with pytest.raises(Unusable):
            joiner.take_moments(data)
    assert packed(joiner.moments()) == before
    steps(joiner, 1)
