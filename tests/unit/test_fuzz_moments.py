"""Optimizer state from another process: of this model and harmless, or refused."""

import contextlib
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as read
from safetensors.torch import save

from app.config import load
from app.learning.inner import InnerLoop
from app.learning.model import build_model
from app.learning.moments import Unusable, packed
from tests.fuzz import efforts, flipped


@pytest.fixture(scope="module")
def trained() -> InnerLoop:
    config = load(["model=micro", "train.optimizer=muon", "data.seq_len=16"])
    loop = InnerLoop(build_model(config.model, 257, 16, seed=1), config.train)
    loop.step([torch.arange(32).reshape(2, 16)], 1e-3, contextlib.nullcontext())
    return loop


def renamed(tensors: dict[str, torch.Tensor], key: str, name: str) -> dict[str, torch.Tensor]:
    return {name if k == key else k: value for k, value in tensors.items()}


def first(tensors: dict[str, torch.Tensor], part: str) -> str:
    return next(key for key in tensors if key.endswith(part))


WRONG: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "a negative square": lambda t: t | {first(t, "exp_avg_sq"): -t[first(t, "exp_avg_sq")] - 1},
    "a negative count": lambda t: t | {first(t, "/step"): torch.tensor(-1.0)},
    "a number from the end": lambda t: renamed(t, first(t, "exp_avg"), "1/-1/exp_avg"),
    "a number with a zero before it": lambda t: t | {"00/0/momentum_buffer": t[first(t, "momentum_buffer")]},
    "another type": lambda t: t | {first(t, "exp_avg"): t[first(t, "exp_avg")].double()},
    "a number of another kind": lambda t: t | {"٠/0/momentum_buffer": t[first(t, "momentum_buffer")]},
}


@pytest.mark.parametrize("how", WRONG)
def test_optimizer_state_that_would_ruin_the_weights_is_refused(how: str, trained: InnerLoop) -> None:
    tensors = WRONG[how](read(packed(trained.moments())))
    with pytest.raises(Unusable):
        trained.take_moments(save({name: value.clone() for name, value in tensors.items()}))


@efforts
def test_optimizer_state_is_of_this_model_or_refused(effort: settings, trained: InnerLoop) -> None:
    whole = packed(trained.moments())

    @effort
    @given(
        st.one_of(
            st.binary(max_size=100),
            st.integers(0, len(whole) - 1).map(lambda end: whole[:end]),
            st.integers(0, 8 * 4000).map(lambda place: flipped(whole, place)),
            st.integers(0, 2**64 - 1).map(lambda size: struct.pack("<Q", size) + whole[8:]),
        )
    )
    def holds(data: bytes) -> None:
        with contextlib.suppress(Unusable):
            trained.take_moments(data)
        for optimizer in trained.optimizer_state():
            for state in optimizer["state"].values():
                for value in state.values():
                    assert not isinstance(value, torch.Tensor) or bool(np.isfinite(value.numpy()).all())

    holds()
