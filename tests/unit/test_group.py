"""A learner of several ranks trains as one of a single rank does."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from app.config import TrainConfig
from app.diloco.fragments import TensorSpec, build_layout, gather, scatter_
from app.learning.gradients import GroupBroken
from app.learning.inner import InnerLoop
from app.learning.model import build_model
from app.learning.moments import packed
from app.learning.orders import Kind, Order, take
from app.learning.ranks import Ranks
from app.learning.shards import check_rows, collect, hand_out, whole
from tests.unit.gang import MODEL, PATIENCE_S, SEQ_LEN, VOCAB, Lead, alone, follower_of, gang, stop, together

pytestmark = pytest.mark.timeout(300)
CONFIG = TrainConfig(optimizer="adamw", tokens=10_000, lr=5e-3, warmup_tokens=0, precision="fp32")
STEPS = 20
SHARING = pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


@pytest.fixture(scope="module", autouse=True)
def _forks():
    yield
    stop()


def batches(step: int, count: int = 4, size: int = 2) -> list[torch.Tensor]:
    """The micro-batches of a step."""
    rows = torch.randint(0, VOCAB, (count * size, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    return list(rows.split(size))


def train(loop: InnerLoop, config: TrainConfig, steps: range, count: int = 4) -> list[float]:
    return [loop.step(batches(step, count), config.lr, threading.Lock()).loss for step in steps]


def loop_alone(config: TrainConfig) -> InnerLoop:
    return InnerLoop(build_model(MODEL, VOCAB, SEQ_LEN, seed=1), config)


def losses_alone(config: TrainConfig, count: int = 4) -> list[float]:
    return train(loop_alone(config), config, range(STEPS), count)


def losses_of(lead: Lead, config: TrainConfig, count: int = 4) -> list[float]:
    return train(lead.loop, config, range(STEPS), count)


@SHARING
@OPTIMIZERS
def test_two_ranks_have_the_loss_curve_of_one_with_the_same_total_batch(optimizer, sharded):
    config = replace(CONFIG, optimizer=optimizer)
    expected = alone(losses_alone, config)
    assert expected[-1] < expected[0] - 0.1
    assert gang(2, sharded, config, losses_of, config) == pytest.approx(expected, abs=1e-4)


def test_three_ranks_whose_shares_of_a_tensor_differ_do_too():
    config = replace(CONFIG, optimizer="muon")
    expected = alone(losses_alone, config, 3)
    assert gang(3, True, config, losses_of, config, 3) == pytest.approx(expected, abs=1e-4)


@SHARING
def test_activations_that_are_computed_again_change_no_loss(sharded):
    config = replace(CONFIG, gradient_checkpointing=True)
    expected = alone(losses_alone, CONFIG)
    assert alone(losses_alone, config) == pytest.approx(expected, abs=1e-6)
    assert gang(2, sharded, config, losses_of, config) == pytest.approx(expected, abs=1e-4)


# ---- fragments

SHAPES = {"emb": (11, 3), "one_row": (1, 4), "vector": (7,), "short": (4, 2), "cube": (5, 2, 3), "single": (1,)}


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            self.register_parameter(name, nn.Parameter(values))


def round_trip(ranks: Ranks) -> bool:
    """Read all fragments, write others, and compare with what lies whole in one process."""
    plain = {name: p.detach().clone() for name, p in Odd().named_parameters()}
    layout = build_layout([TensorSpec(name, shape, name == "emb") for name, shape in SHAPES.items()], 4)
    assert sum(piece.name == "emb" for f in layout.fragments for piece in f.pieces) > 1  # slices of it
    model = Odd()
    if ranks.sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world,)))
    sharded = dict(model.named_parameters())
    check_rows(sharded)
    for fragment in layout.fragments:
        found = collect(fragment, sharded, ranks)
        assert ranks.rank > 0 or torch.equal(found, gather(fragment, plain))
    for fragment in layout.fragments:
        values = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(fragment.index))
        scatter_(fragment, values, plain)
        hand_out(fragment, values if ranks.rank == 0 else None, sharded, ranks)
        found = collect(fragment, sharded, ranks)
        assert ranks.rank > 0 or torch.equal(found, values)
    return all(torch.equal(whole(p.detach()), plain[name]) for name, p in sharded.items())


@pytest.mark.parametrize(("world", "sharded"), [(2, True), (3, True), (2, False)])
def test_fragments_come_and_go_whatever_the_shapes_and_where_the_rows_lie(world, sharded):
    assert together(world, sharded, round_trip) == [True] * world


def adopt_alone(config: TrainConfig) -> list[float]:
    loop = loop_alone(config)
    for parameter in loop.parameters:
        with torch.no_grad():
            parameter.mul_(0.5)
    return train(loop, config, range(STEPS))


def adopt(lead: Lead, config: TrainConfig) -> list[float]:
    for fragment in lead.layout.fragments:
        lead.weights.scatter(fragment, 0.5 * lead.weights.gather(fragment))
    return train(lead.loop, config, range(STEPS))


@SHARING
def test_what_rank_0_adopts_all_ranks_step_on_with(sharded):
    assert gang(2, sharded, CONFIG, adopt, CONFIG) == pytest.approx(alone(adopt_alone, CONFIG), abs=1e-4)


# ---- steps that are skipped


def poisoned(lead: Lead, config: TrainConfig) -> list[bool]:
    fragment = lead.layout.fragments[0]
    before = [lead.weights.gather(f) for f in lead.layout.fragments]
    bad = before[0].clone()
    bad[3] = float("nan")
    lead.weights.scatter(fragment, bad)
    skipped = [lead.loop.step(batches(0), config.lr, threading.Lock()).skipped]
    lead.weights.scatter(fragment, before[0])
    after = [lead.weights.gather(f) for f in lead.layout.fragments]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    skipped.append(lead.loop.step(batches(1), config.lr, threading.Lock()).skipped)
    assert all(torch.isfinite(lead.weights.gather(f)).all() for f in lead.layout.fragments)
    return skipped


@SHARING
def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(sharded):
    assert gang(2, sharded, CONFIG, poisoned, CONFIG) == [True, False]


# ---- optimizer state


def moments_alone(config: TrainConfig) -> tuple[bytes, list[float], list[float]]:
    loop = loop_alone(config)
    train(loop, config, range(5))
    data = packed(loop.moments())
    onward = train(loop, config, range(5, STEPS))
    other = loop_alone(config)
    other.take_moments(data)
    return data, onward, train(other, config, range(STEPS))


def moments_of(lead: Lead, config: TrainConfig) -> tuple[bytes, list[float]]:
    train(lead.loop, config, range(5))
    return packed(lead.loop.moments()), train(lead.loop, config, range(5, STEPS))


def with_moments(lead: Lead, config: TrainConfig, data: bytes) -> list[float]:
    lead.loop.take_moments(data)
    return train(lead.loop, config, range(STEPS))


@SHARING
@OPTIMIZERS
def test_optimizer_state_goes_from_group_to_group_and_to_a_single_rank(optimizer, sharded):
    config = replace(CONFIG, optimizer=optimizer)
    data, onward, again = alone(moments_alone, config)
    given, same = gang(2, sharded, config, moments_of, config)
    assert same == pytest.approx(onward, abs=1e-4)  # to be asked for it changes nothing
    assert len(given) == len(data)
    for source in (data, given):
        assert gang(2, sharded, config, with_moments, config, source) == pytest.approx(again, abs=1e-3)


def random_states(lead: Lead) -> tuple[bool, bool]:
    first = lead.loop.rng_states()
    lead.loop.load_rng_states(first.flip(0))
    second = lead.loop.rng_states()
    lead.loop.load_rng_states(first[:1])  # of a group of another size
    return torch.equal(first[0], first[1]), torch.equal(second, first.flip(0)) and torch.equal(
        lead.loop.rng_states(), second
    )


def test_each_rank_has_a_random_generator_of_its_own_which_is_kept():
    assert gang(2, False, CONFIG, random_states) == (False, True)


# ---- ranks that are gone, or late

SHORT_S = 2.0


def broken(lead: Lead, config: TrainConfig) -> float:
    """After how many seconds a step fails."""
    started = time.monotonic()
    with pytest.raises(GroupBroken):
        lead.loop.step(batches(0), config.lr, threading.Lock())
    return time.monotonic() - started


def left_in_the_middle(ranks: Ranks, config: TrainConfig, late: bool) -> float | None:
    """Rank 1 hears of a step and leaves, or does not come."""
    if ranks.rank == 0:
        lead = Lead(config, ranks)
        ranks.patience_s = SHORT_S if late else PATIENCE_S
        return broken(lead, config)
    follower_of(ranks, config)
    order = take(ranks)
    assert order.kind == Kind.STEP
    ranks.receive(torch.empty(order.sizes, dtype=torch.int64), 0)
    if late:
        ranks.patience_s = PATIENCE_S
        with pytest.raises(GroupBroken):  # rank 0 has gone
            ranks.receive(torch.empty(1), 0)
    return None


@SHARING
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_is_gone_or_late_breaks_the_group(sharded, late):
    after = together(2, sharded, left_in_the_middle, CONFIG, late)[0]
    assert after < PATIENCE_S / 2
    assert not late or after > SHORT_S / 2


def silent(ranks: Ranks, config: TrainConfig) -> float | None:
    """Rank 0 says that it will be quick, and then nothing."""
    if ranks.rank == 0:
        lead = Lead(config, ranks)
        ranks.patience_s = SHORT_S
        lead.loop.tell(Order(Kind.BEAT))
        ranks.patience_s = PATIENCE_S
        with pytest.raises(GroupBroken):  # rank 1 has gone
            ranks.receive(torch.empty(1), 1)
        return None
    started, heard = time.monotonic(), []
    with pytest.raises(GroupBroken):
        follower_of(ranks, config).follow(heard.append)
    assert heard == [SHORT_S, SHORT_S]
    return time.monotonic() - started


def test_a_rank_that_hears_nothing_from_rank_0_leaves():
    assert SHORT_S / 2 < together(2, False, silent, CONFIG)[1] < PATIENCE_S / 2
