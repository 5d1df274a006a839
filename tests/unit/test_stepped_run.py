"""Whole runs in one process: the baseline and Decoupled DiLoCo agree where theory says that they must."""

import dataclasses

import pytest

from app.config import load
from app.stepped_run import Schedule, train_data_parallel, train_decoupled
from tests.small import SMALL

BRIEF = [
    *SMALL,
    "train.warmup_tokens=600",
    "train.precision=fp32",
    "diloco.sync_interval=8",
    "train.tokens=12000",
]
LOCKSTEP = Schedule()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data") / "data"


def config(*overrides, **dials):
    loaded = load([*BRIEF, *overrides])
    return dataclasses.replace(loaded, diloco=dataclasses.replace(loaded.diloco, **dials))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_learner_with_a_plain_outer_step_is_plain_training(folder, optimizer):
    plainly = {"overlap_steps": 0, "outer_lr": 1.0, "outer_momentum": 0.0, "guard_z": 0.0, "average": 0.0}
    one = config("learners=1", f"train.optimizer={optimizer}", **plainly)
    plain, decoupled = train_data_parallel(one, folder, LOCKSTEP), train_decoupled(one, folder, LOCKSTEP)
    assert decoupled.merges > 20
    assert decoupled.discarded_share == 0.0
    assert decoupled.tokens == plain.tokens
    assert decoupled.loss == pytest.approx(plain.loss, rel=1e-4)


def test_the_last_weights_of_data_parallel_weigh_like_all_others(folder):
    """As in a run by the actors, where the syncer follows the weights and its last round is like the others."""

    def loss(**dials):
        parallel = load([*BRIEF, "algo=data_parallel", "learners=1"])
        dials = {"average": 0.5} | dials
        dialed = dataclasses.replace(parallel, diloco=dataclasses.replace(parallel.diloco, **dials))
        return train_data_parallel(dialed, folder, LOCKSTEP).loss

    assert loss(average_last=0.9) == loss(average_last=0.0) != loss(average=0.0)
    assert loss(average_last=1.0, last_round="mean") == loss(average=0.0)


def test_workers_of_different_batch_sizes_are_one_batch(folder):
    """Two workers, of 1 and 3 samples a step, train like one of 4."""
    sizes = ("learners=2", "train.batch_size=3", "+pools.small.min_learners=1", "+pools.small.batch_size=1")
    unequal, whole = load([*BRIEF, *sizes]), load([*BRIEF, "learners=1", "train.batch_size=4"])
    got, want = (train_data_parallel(each, folder, LOCKSTEP) for each in (unequal, whole))
    assert got.tokens == want.tokens
    assert got.loss == pytest.approx(want.loss, rel=1e-4)


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_several_learners_learn_alike_every_time(folder, codec):
    several = config("learners=3", "diloco.adopt=overwrite", f"diloco.codec_up={codec}", f"diloco.codec_down={codec}")
    first, second = train_decoupled(several, folder, LOCKSTEP), train_decoupled(several, folder, LOCKSTEP)
    assert first == second
    assert first.contributors == pytest.approx(3.0)
    assert 0.0 < first.discarded_share < 0.5
    assert first.loss < 5.2  # ln 257 is 5.55


def test_slow_learners_and_deaths_take_their_share(folder):
    slow = ("+pools.slow.min_learners=1", "+pools.slow.slowdown=4", "+pools.slow.batch_size=1")
    mixed = config("learners=3", "train.tokens=6000", *slow)
    schedule = Schedule(adopt_on_arrival=True, jitter_s=0.02, kill_every_s=2.0, notice_s=0.5, away_s=1.5)
    disturbed = train_decoupled(mixed, folder, schedule)
    undisturbed = train_decoupled(mixed, folder, dataclasses.replace(schedule, kill_every_s=0.0))
    # In 0.5 s two learners make 4 steps of 2 samples each, the slow one makes one of 1; a sample has 32 tokens.
    assert undisturbed.virtual_s == pytest.approx(6_000 / (2 * (4 * 2 + 4 * 2 + 1) * 32), abs=0.5)
    assert undisturbed.deaths == 0
    assert disturbed.deaths == disturbed.virtual_s // 2
    assert disturbed.virtual_s > undisturbed.virtual_s
    assert disturbed.discarded_share > undisturbed.discarded_share
    assert 1.5 < disturbed.contributors < undisturbed.contributors <= 3.0


def test_borrowed_learners_shorten_a_run_and_leave_all_their_work(folder):
    two = config("learners=2", "train.tokens=12000")
    half = {"borrowed_from": 0.25, "borrowed_until": 0.75}
    alone, helped = (train_decoupled(two, folder, Schedule(borrowed=number, **half)) for number in (0, 2))
    # A quarter alone, half with twice as many, a quarter alone: three quarters of the time.
    assert helped.virtual_s == pytest.approx(0.75 * alone.virtual_s, rel=0.1)
    assert helped.deaths == 0
    assert helped.discarded_share == alone.discarded_share == 0.0
    assert 2.2 < helped.contributors < 4.0
    assert helped.loss == pytest.approx(alone.loss, rel=0.03)
