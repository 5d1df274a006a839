"""Learners' names say which pool they are of."""

import pytest

from app.config import load
from app.config.roster import extra_learner, first_learners, pool_name_of

SIZES = {"fast": 2, "far-away": 0, "slow": 1}


@pytest.mark.parametrize(
    ("learner", "pool"),
    [
        ("learner-0", "fast"),
        ("learner-1", "fast"),
        ("learner-2", "slow"),
        ("learner-3", None),
        ("fast-0", "fast"),
        ("far-away-17", "far-away"),
        ("far-away", None),
        ("slow-01", None),
        ("slow--1", None),
        ("slow-\u0661", None),
        ("slow-", None),
        ("other-0", None),
        ("learner", None),
        ("", None),
    ],
)
def test_pool_of_a_name(learner: str, pool: str | None) -> None:
    assert pool_name_of(learner, SIZES) == pool


def test_names_are_made_as_they_are_read() -> None:
    assert [pool_name_of(learner, SIZES) for learner in first_learners(3)] == ["fast", "fast", "slow"]
    assert [pool_name_of(extra_learner(pool, 5), SIZES) for pool in SIZES] == list(SIZES)


def test_a_learner_has_the_settings_of_its_pool() -> None:
    config = load(["learners=3", "+pools.slow.min_learners=1", "+pools.slow.batch_size=2", "pools.slow.max_learners=4"])
    assert config.pool_of("slow-2").train.batch_size == config.pool_of("learner-2").train.batch_size == 2
    assert config.pool_of("local-0").train.batch_size == config.train.batch_size
    assert not config.has_learner("fast-0")
    with pytest.raises(ValueError, match="fast-0 is no learner"):
        config.pool_of("fast-0")
