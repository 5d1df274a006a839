import pytest

from app.config import TrainConfig
from app.learning.schedule import TokenEstimate, learning_rate, rejoin_factor

CONFIG = TrainConfig(tokens=1100, warmup_tokens=100, lr=2.0, min_lr_share=0.1)


@pytest.mark.parametrize(
    ("tokens", "lr"),
    [
        (0, 0.0),
        (25, 0.5),
        (100, 2.0),
        (350, 0.2 + 1.8 * (1 + 0.5**0.5) / 2),  # a quarter of the way: cos 45°
        (600, 1.1),  # half way: the mean of 2.0 and 0.2
        (1100, 0.2),
        (99_999, 0.2),
        (-5, 0.0),
    ],
)
def test_warm_up_then_cosine_then_clamped(tokens, lr):
    assert learning_rate(tokens, CONFIG) == pytest.approx(lr, abs=1e-12)


def test_without_warm_up_it_starts_at_the_top():
    assert learning_rate(0, TrainConfig(tokens=10, warmup_tokens=0, lr=2.0)) == 2.0


def test_a_warm_up_longer_than_the_budget_still_ends():
    config = TrainConfig(tokens=10, warmup_tokens=40, lr=2.0, min_lr_share=0.1)
    assert learning_rate(10, config) == 0.5
    assert learning_rate(40, config) == 0.2


def test_rejoin_factor_rises_in_equal_steps_to_one():
    assert [rejoin_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rejoin_factor(0, 0) == 1.0


def test_without_history_the_pool_is_taken_to_step_alike():
    estimate = TokenEstimate(budget=10_000)
    estimate.update(global_tokens=400, own_tokens=100, live=4)
    assert estimate.at(100) == 400
    assert estimate.at(110) == 440


def test_with_history_the_measured_growth_counts():
    estimate = TokenEstimate(budget=10_000)
    estimate.update(400, 100, 4)
    estimate.update(700, 200, 4)  # 3 global tokens for each of our own
    assert estimate.at(210) == 730


def test_it_never_falls():
    estimate = TokenEstimate(budget=10_000)
    estimate.update(400, 100, 4)
    assert estimate.at(200) == 800
    estimate.update(600, 200, 4)
    assert estimate.at(200) == 800
    estimate.update(500, 300, 4)  # a syncer that came back with an older count
    assert estimate.at(300) == 800


def test_it_stops_at_the_budget():
    estimate = TokenEstimate(budget=1000)
    estimate.update(900, 100, 4)
    assert estimate.at(10**9) == 1000
    estimate.update(5000, 200, 4)
    assert estimate.at(200) == 1000


def test_growth_stays_within_sane_limits():
    burst = TokenEstimate(budget=10**9)
    burst.update(0, 0, 2)
    burst.update(10_000, 1, 2)
    assert burst.at(2) == 10_000 + 16
    silence = TokenEstimate(budget=10**9)
    silence.update(1000, 0, 2)
    silence.update(1000, 500, 2)  # nothing was reported meanwhile, not even our own steps
    assert silence.at(600) == 1000 + 100


def test_updates_without_own_progress_only_move_the_count():
    estimate = TokenEstimate(budget=10_000)
    estimate.update(100, 50, 2)
    estimate.update(300, 50, 2)
    assert estimate.at(50) == 300
    assert estimate.at(60) == 320


def test_before_any_update_own_tokens_are_all_there_is():
    assert TokenEstimate(budget=100).at(30) == 30
