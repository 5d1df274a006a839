"""The float32 form of Muon against torch's own, and against float64."""

import numpy as np
import pytest
import torch

from app.learning.muon import FloatMuon, orthogonal

SHAPES = [(32, 32), (88, 32), (32, 88), (32, 32), (1, 7), (5, 1)]
QUINTIC = (3.4445, -4.775, 2.0315)


def trained(make, steps=4, dtype=torch.float32):
    """Matrices of all shapes, one without a gradient, after steps with gradients that depend on the seed alone."""
    generator = torch.Generator().manual_seed(3)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
    idle = torch.nn.Parameter(torch.ones(3, 3, dtype=dtype))
    optimizer = make([*matrices, idle])
    for _ in range(steps):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator, dtype=dtype)
        optimizer.step()
    return [*matrices, idle], optimizer


def test_steps_are_torch_s_own_up_to_bfloat16():
    lr, decay, momentum = 0.01, 0.1, 0.9
    ours, our_optimizer = trained(lambda m: FloatMuon(m, lr, decay, momentum))
    theirs, their_optimizer = trained(
        lambda m: torch.optim.Muon(m, lr, decay, momentum, adjust_lr_fn="match_rms_adamw"),
    )
    start, _ = trained(lambda m: FloatMuon(m, lr, decay, momentum), steps=0)
    for one, other, before in zip(ours[:-1], theirs[:-1], start[:-1], strict=True):
        moved = (other - before).norm()
        assert moved > 0
        assert (one - other).norm() < 0.03 * moved
    assert torch.equal(ours[-1], start[-1])
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        mine, torch_s = our_optimizer.state[one], their_optimizer.state[other]
        assert mine.keys() == torch_s.keys()
        assert torch.allclose(mine["momentum_buffer"], torch_s["momentum_buffer"])
    their_optimizer.load_state_dict(our_optimizer.state_dict())


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (6, 6), (5, 17)])
def test_the_quintic_acts_on_singular_values(shape):
    """x = U s Vᵀ becomes U p(s) Vᵀ, p five times a·s + b·s³ + c·s⁵ of the singular values over the Frobenius norm."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn((3, *shape), generator=generator)
    found = orthogonal(matrices, QUINTIC, 5, 1e-7)
    for matrix, result in zip(matrices.double().numpy(), found, strict=True):
        u, s, v = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
        for _ in range(5):
            s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
        np.testing.assert_allclose(result.numpy(), (u * s) @ v, rtol=1e-4, atol=1e-4)


def test_a_matrix_of_zeros_stays_zero():
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4), QUINTIC, 5, 1e-7), torch.zeros(2, 3, 4))


def test_a_closure_is_evaluated_with_gradients():
    matrix = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = FloatMuon([matrix], 0.1, 0.0, 0.9)

    def closure():
        loss = (matrix * matrix).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6
    assert not torch.equal(matrix, torch.ones(2, 3))
