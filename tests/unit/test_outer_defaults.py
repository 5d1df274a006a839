"""η and μ by the number of outer rounds."""

import pytest

from app.config import load
from app.config.schema import LEARNING_RATES
from app.diloco.outer_defaults import outer_defaults
from app.diloco.settings import DilocoSettings

DIALS = DilocoSettings()


@pytest.mark.parametrize(
    ("rounds", "muon_lr", "momentum"),
    [
        (0.0, 0.8, 0.5),
        (7.0, 0.8, 0.5),
        (25.0, 0.8, 0.5),
        (66.0, 0.492, 0.692),
        (100.0, 0.4, 0.75),
        (625.0, 0.16, 0.9),
        (1e9, 0.16, 0.9),
    ],
)
def test_the_rule_by_hand(rounds: float, muon_lr: float, momentum: float) -> None:
    assert outer_defaults(rounds, "muon", DIALS) == (pytest.approx(muon_lr), pytest.approx(momentum))
    assert outer_defaults(rounds, "adamw", DIALS) == (pytest.approx(muon_lr / 1.6, abs=1e-3), pytest.approx(momentum))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("overrides", "rounds"),
    [
        (["train.tokens=6553600"], 100),  # 4 · 8 · 64 tokens a step, 24 steps a round
        (["train.tokens=6553600", "learners=2"], 200),
        (["train.tokens=6553600", "train.accumulation=2"], 50),
        (["train.tokens=6553600", "diloco.sync_interval=48"], 50),
        (["train.tokens=6553600", "algo=streaming"], 100),
        (["train.tokens=6553600", "pools.local.batch_size=16"], 50),
        (["train.tokens=6553600", "pools.local.accumulation=4"], 25),
        (["train.tokens=6553600", "+pools.slow.min_learners=2", "+pools.slow.slowdown=2"], 100 * 4 / 3),
        (
            ["train.tokens=6553600", "+pools.slow.min_learners=2", "+pools.slow.slowdown=2", "diloco.min_quorum=3"],
            100 * 2 / 3,
        ),
        (["train.tokens=6553600", "+pools.slow.min_learners=2", "+pools.slow.slowdown=2", "algo=streaming"], 100),
        (["train.tokens=6553600", "pools=mixed"], 100 * 4 / (2 + 2 * 0.5 / 3)),
    ],
)
def test_a_configuration_follows_its_budget(overrides: list[str], rounds: float, optimizer: str) -> None:
    settings = load(["data.seq_len=64", "train.batch_size=8", f"train.optimizer={optimizer}", *overrides]).diloco
    exact = 6553600 / (4 * 8 * 64 * 24) * rounds / 100
    assert (settings.outer_lr, settings.outer_momentum) == outer_defaults(exact, optimizer, DIALS)


def test_the_rule_has_dials() -> None:
    """N = 400 rounds of 4 · 8 · 64 · 24 tokens."""
    run = ["data.seq_len=64", "train.tokens=19660800"]
    memory = ["diloco.outer_memory=0.2", "diloco.outer_memory_least=3", "diloco.outer_memory_most=5"]
    for dials, eta, mu in (
        ([], 0.2, 0.875),  # remembers 0.4 · 20 rounds
        (memory[:1], 0.4, 0.75),
        ([*memory[:1], "diloco.outer_gain_muon=2"], 0.5, 0.75),
        (["diloco.outer_memory_most=5"], 0.32, 0.8),
        ([*memory, "diloco.outer_memory=0.01"], 0.533, 0.667),
        (["train.optimizer=adamw", "diloco.outer_gain_adamw=0.8"], 0.1, 0.875),
    ):
        settings = load([*run, *dials]).diloco
        assert (settings.outer_lr, settings.outer_momentum) == (eta, mu)


def test_what_is_given_stands() -> None:
    settings = load(["diloco.outer_lr=0.7", "train.tokens=100000000"]).diloco
    assert (settings.outer_lr, settings.outer_momentum) == (0.7, 0.9)
    plain = load(["algo=data_parallel"]).diloco
    assert (plain.outer_lr, plain.outer_momentum) == (1.0, 0.0)


def test_the_learning_rate_suits_the_inner_optimizer() -> None:
    assert load([]).train.lr == load(["train.optimizer=muon"]).train.lr == LEARNING_RATES["muon"]
    assert load(["train.optimizer=adamw"]).train.lr == LEARNING_RATES["adamw"]
    assert load(["train.optimizer=adamw", "train.lr=0.5"]).train.lr == 0.5
