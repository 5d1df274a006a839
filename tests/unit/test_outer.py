import numpy as np
import pytest
import torch

from app.diloco.outer import outer_step

SHAPES = [(), (1,), (7,), (1, 5), (13, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["nesterov", "sgd"])
@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (0.4, 0.6), (1.0, 0.1)])
def test_equals_torch_sgd(shape: tuple[int, ...], rule: str, lr: float, mu: float) -> None:
    generator = torch.Generator().manual_seed(1)
    theta, momentum = torch.randn(shape, generator=generator), torch.zeros(shape)
    parameter = theta.clone().requires_grad_()
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=rule == "nesterov")
    for _ in range(6):
        grad = torch.randn(shape, generator=generator)
        parameter.grad = grad.clone()
        sgd.step()
        theta, momentum = outer_step(rule, theta, momentum, grad, lr, mu)
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(momentum, sgd.state[parameter]["momentum_buffer"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_a_float64_reference(dtype: torch.dtype) -> None:
    theta, b, v = (torch.randn(1009, generator=torch.Generator().manual_seed(s)).to(dtype) for s in range(3))
    new_theta, new_b = outer_step("nesterov", theta, b, v, 0.7, 0.9)
    theta64, b64, v64 = (x.double().numpy() for x in (theta, b, v))
    b64 = 0.9 * b64 + v64
    theta64 = theta64 - 0.7 * (v64 + 0.9 * b64)
    assert new_theta.dtype == new_b.dtype == torch.float32
    for got, want in ((new_theta, theta64), (new_b, b64)):
        assert np.linalg.norm(got.double().numpy() - want) <= 1e-6 * np.linalg.norm(want)


def test_by_hand() -> None:
    theta, b = outer_step("nesterov", torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([2.0]), 0.5, 0.25)
    assert b.tolist() == [3.0]  # 0.25·4 + 2
    assert theta.tolist() == [-0.375]  # 1 − 0.5·(2 + 0.25·3)


def test_sgd_by_hand() -> None:
    theta, b = outer_step("sgd", torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([2.0]), 0.5, 0.25)
    assert (b.tolist(), theta.tolist()) == ([3.0], [-0.5])  # 1 − 0.5·3


def test_another_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="nesterov, sgd"):
        outer_step("adam", torch.zeros(3), torch.zeros(3), torch.zeros(3), 0.7, 0.9)


def test_plain_step_lands_on_the_learner() -> None:
    """η = 1, μ = 0: Θ − (Θ − θ) = θ."""
    theta, local = torch.randn(1009), torch.randn(1009)
    new_theta, _ = outer_step("nesterov", theta, torch.zeros(1009), theta - local, 1.0, 0.0)
    assert (new_theta - local).norm() <= 1e-6 * local.norm()


def test_arguments_stay_as_they_are() -> None:
    theta, b, v = torch.ones(3), torch.ones(3), torch.ones(3)
    new_theta, new_b = outer_step("nesterov", theta, b, v, 0.7, 0.0)
    new_theta.zero_()
    new_b.zero_()
    assert [x.tolist() for x in (theta, b, v)] == [[1.0] * 3] * 3


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        outer_step("nesterov", torch.zeros(3), torch.zeros(3), torch.zeros(1), 0.7, 0.9)


def test_bits_do_not_depend_on_threads() -> None:
    x = [torch.randn(300_007, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = outer_step("nesterov", *x, 0.7, 0.9)
        torch.set_num_threads(2)
        two = outer_step("nesterov", *x, 0.7, 0.9)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
