"""Whole runs on a bad network: every token has one fate, every sample is used once, versions only rise."""

import random
from itertools import product

import pytest
import torch

from app.diloco.messages import Refusal
from app.diloco.settings import ADOPTIONS, CODECS, LATE_RULES, DilocoSettings
from tests.unit.network import World
from tests.unit.rest import check_at_rest, run_out, settle

TICKS = 100


def random_settings(seed: int, adopt: str, late: str) -> DilocoSettings:
    chosen = random.Random(seed)
    return DilocoSettings(
        fragments=chosen.choice([1, 2, 3]),
        sync_interval=chosen.choice([3, 4, 6]),
        overlap_steps=chosen.randrange(6),
        min_quorum=chosen.choice([1, 1, 2]),
        grace_safety=chosen.choice([0.0, 0.8]),
        ring_versions=chosen.choice([1, 2, 4]),
        codec_up=chosen.choice(CODECS),
        codec_down=chosen.choice(CODECS),
        adopt=adopt,
        mix_alpha=chosen.choice([0.25, 0.5]),
        late=late,
        round_deadline_s=chosen.choice([6.0, 30.0]),
    )


MORE = [pytest.param(*case, marks=pytest.mark.slow) for case in product((2, 3), ADOPTIONS[:-1])]


@pytest.mark.parametrize("late", LATE_RULES)
@pytest.mark.parametrize(("batch", "adopt"), [*product((0, 1), ADOPTIONS[:-1]), (0, "keep"), *MORE])
def test_every_token_has_one_fate(adopt: str, late: str, batch: int) -> None:
    merges, refusals = 0, set[Refusal]()
    for seed in range(8 * batch, 8 * batch + 8):
        world = World(seed, 3, random_settings(seed, adopt, late), faults=True, deaths=seed % 3 > 0)
        for _ in range(TICKS):
            world.tick()
        run_out(world)
        assert Refusal.CORRUPT not in world.protocol.refusals  # nobody sent garbage
        merges += sum(world.versions)
        refusals |= set(world.protocol.refusals)
    assert merges > 40
    assert {Refusal.LATE, Refusal.INCARNATION} <= refusals


@pytest.mark.parametrize("seed", range(12))
def test_one_learner_alone_stays_where_it_is(seed: int) -> None:
    """M=1, η=1, μ=0 and rebase: the merges give back what the learner did, whatever happens on the way."""
    settings = DilocoSettings(
        fragments=2, sync_interval=4, adopt="rebase", outer_lr=1.0, outer_momentum=0.0, ring_versions=3
    )
    world = World(seed, 1, settings, faults=True, deaths=False)
    process = world.processes["learner-0"]
    for _ in range(TICKS):
        world.tick()
    settle(world)
    check_at_rest(world)
    assert sum(world.versions) > 5
    start = World(seed, 0, settings, faults=False, deaths=False).protocol
    for fragment, first in zip(world.layout.fragments, start.fragments, strict=True):
        offset = 0
        for piece in fragment.pieces:
            want = first.theta[offset : offset + piece.numel].view(piece.shape)
            moved = process.moved[piece.name]
            part = process.parameters[piece.name]
            if moved.dim():
                moved, part = moved[piece.start_row : piece.stop_row], part[piece.start_row : piece.stop_row]
            torch.testing.assert_close(part, want + moved, atol=2e-5, rtol=0)
            offset += piece.numel


def test_a_quiet_network_loses_nothing() -> None:
    """Without faults a rebasing fleet has every token merged or outstanding."""
    settings = DilocoSettings(fragments=2, sync_interval=4, adopt="rebase")
    world = World(1, 3, settings, faults=False, deaths=False)
    for _ in range(TICKS):
        world.tick()
    settle(world)
    check_at_rest(world)
    assert world.protocol.books.balance().discarded == {}
    assert world.protocol.books.balance().merged > 0
