"""Data parallel over real processes: the same bits for all, the same weights as one process with all the data."""

import contextlib

import pytest
import torch
from accelerate.state import AcceleratorState

from app.learning.gathering import Formation
from app.learning.inner import InnerLoop
from tests.unit.members import Member, all_do, rows, small_loop, stop_server

SIZES = (2, 3, 4)
LRS = (8e-3, 1e-2, 1.2e-2)


@pytest.fixture(scope="module", autouse=True)
def _server():
    yield
    stop_server()


@pytest.fixture
def members():
    made = [Member(seed) for seed in range(3)]  # weights of their own
    yield made
    for member in made:
        member.end()
    AcceleratorState._reset_state(reset_partial_state=True)


def form(members: list[Member], generation: str, source: int) -> None:
    port = all_do(members, "port")[0]
    world = len(members)
    places = [Formation(generation, rank, world, "127.0.0.1", port, source) for rank in range(world)]
    all_do(members, "form", places)


def step(members: list[Member], t: int, *without: int, leaving: int = -1) -> list:
    """Step t on batches that depend on it; the members named in `without` have no data."""
    data = [[] if m in without else [rows(10 * t + m, size)] for m, size in enumerate(SIZES)]
    return all_do(members, "step", data, LRS, [m == leaving for m in range(len(members))])


def assert_same_bits(members: list[Member]) -> list[torch.Tensor]:
    first, *others = all_do(members, "weights")
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return first


def alone(loop: InnerLoop, *steps: int) -> None:
    for t in steps:
        whole = torch.cat([rows(10 * t + m, size) for m, size in enumerate(SIZES)])
        loop.step([whole], sum(LRS) / 3, contextlib.nullcontext())


def assert_close(weights: list[torch.Tensor], loop: InnerLoop) -> None:
    for mine, want in zip(weights, loop.parameters, strict=True):
        error, size = (mine - want.detach()).norm(), want.detach().norm()
        assert error <= 1e-5 * size


def test_members_keep_the_same_weights_as_one_process_also_after_one_was_killed(members):
    form(members, "first", source=1)
    for t in range(3):
        results = step(members, t)
        assert len({result.loss for result, _ in results}) == 1
        assert [result.tokens for result, _ in results] == [16 * size for size in SIZES]
    reference = small_loop(1)  # as the source
    alone(reference, 0, 1, 2)
    assert_close(assert_same_bits(members), reference)

    members[2].end()
    survivors = members[:2]
    assert all_do(survivors, "step", [[rows(30, 2)], [rows(31, 3)]], LRS[:2], [False] * 2) == ["broken"] * 2
    assert_same_bits(survivors)  # a step that broke has changed nothing
    members[2] = Member(9)
    form(members, "second", source=0)
    assert_close(assert_same_bits(members), reference)
    for t in (3, 4):
        step(members, t)
    alone(reference, 3, 4)
    assert_close(assert_same_bits(members), reference)  # the optimizer's state came along


def test_what_one_member_knows_all_know(members):
    form(members, "first", source=0)
    before = assert_same_bits(members)
    assert all(result.skipped for result, _ in step(members, 0, 0, 1, 2))  # nobody has data
    all_do(members[1:2], "poison")
    assert all(result.skipped for result, _ in step(members, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, assert_same_bits(members), strict=True))
    results = step(members, 1, 1, leaving=2)  # one without data, one that leaves
    assert [leaving for _, leaving in results] == [True] * 3
    assert [result.tokens for result, _ in results] == [32, 0, 64]
    assert not any(result.skipped for result, _ in results)
    after = assert_same_bits(members)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
