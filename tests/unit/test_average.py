"""Θ̄ against a float64 reference, and how much of the run it remembers."""

import numpy as np
import pytest
import torch

from app.diloco.average import average_weight, averaged
from app.diloco.settings import DilocoSettings
from tests.unit.tiny import Hand


@pytest.mark.parametrize(
    ("average", "before", "clock", "last", "want"),
    [
        (0.1, 976, 1000, False, 0.24),
        (0.5, 976, 1000, False, 0.048),
        (0.1, 24, 48, False, 1.0),  # 24 steps are more than a tenth of 48
        (0.1, 976, 1000, True, 0.5),
        (0.1, 900, 1000, True, 1.0),
        (0.1, 1000, 1000, False, 0.0),  # no step in between
        (0.0, 976, 1000, False, 1.0),
        (0.1, 0, 0, False, 1.0),
    ],
)
def test_the_weight_of_a_version_by_hand(average: float, before: int, clock: int, last: bool, want: float) -> None:
    settings = DilocoSettings(average=average, average_last=0.5)
    assert average_weight(settings, before, clock, last) == pytest.approx(want)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 1, 2)])
def test_the_average_of_a_path_equals_the_reference(shape: tuple[int, ...]) -> None:
    settings = DilocoSettings(average=0.3)
    generator = torch.Generator().manual_seed(1)
    path = [torch.randn(shape, generator=generator) for _ in range(40)]
    average, want = path[0], path[0].double().numpy()
    for i, theta in enumerate(path[1:], start=1):
        kept = average.clone()
        new = averaged(average, theta, average_weight(settings, 24 * (i - 1), 24 * i, False))
        assert torch.equal(average, kept)  # never in place
        average = new
        want = want + (theta.double().numpy() - want) * min(1.0, 24 / (0.3 * 24 * i))
    np.testing.assert_allclose(average.numpy(), want, rtol=1e-5, atol=1e-6)


def test_a_protocol_keeps_the_average_of_its_versions() -> None:
    hand = Hand(fragments=1, average=0.8, merge="mean", outer_lr=0.5)
    hand.join("a")
    start = hand.protocol.fragments[0].theta.double().numpy()
    average, theta = start, start
    for step in range(1, 6):
        hand.step("a", 4)
        hand.poll("a")
        hand.answer("a", 0)
        hand.publish()
        hand.adopt("a")
        theta = theta + 0.5 * 4 * 0.125
        average = average + (theta - average) * min(1.0, 1 / (0.8 * step))
    fragment = hand.protocol.fragments[0]
    assert fragment.version == 5
    np.testing.assert_allclose(fragment.theta.numpy(), theta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fragment.average.numpy(), average, rtol=1e-5, atol=1e-6)
