import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from app.learning.evaluate import evaluate
from app.learning.rows import TokenRows


class Known(torch.nn.Module):
    """Gives token t the probability p[t], whatever came before."""

    def __init__(self, p: list[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(p).log())

    def forward(self, input_ids, **_options):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


ROWS = TokenRows([np.array([[0, 1, 1], [1, 2, 0]], np.uint16), np.array([[2, 2, 2]], np.uint16)])
BYTES = np.array([0, 1, 3], np.int32)  # token 0 is the end of text


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_loss_and_bits_per_byte_by_hand(batch_size):
    result = evaluate(Known([0.5, 0.25, 0.25]), ROWS, BYTES, batch_size)
    # predicted: 1 1 | 2 0 | 2 2, that is five tokens of 2 bits and one of 1 bit, for 1+1+3+0+3+3 bytes
    assert result.tokens == 6
    assert result.bytes == 11
    assert result.loss == pytest.approx(11 * math.log(2) / 6, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(1.0, rel=1e-6)


def test_a_uniform_guess_over_bytes_is_eight_bits_per_byte():
    rows = TokenRows([np.arange(64, dtype=np.uint16).reshape(4, 16)])
    result = evaluate(Known([1 / 256] * 256), rows, np.ones(256, np.int32), 3)
    assert result.bits_per_byte == pytest.approx(8.0, rel=1e-6)
    assert result.tokens == result.bytes == 60


def test_it_leaves_no_gradient_and_the_mode_as_it_was():
    model = Known([0.5, 0.25, 0.25]).train()
    evaluate(model, ROWS, BYTES, 2)
    assert model.training
    assert model.logits.grad is None
    model.eval()
    evaluate(model, ROWS, BYTES, 2)
    assert not model.training


def test_nothing_to_evaluate_on_is_refused():
    with pytest.raises(ValueError, match="nothing"):
        evaluate(Known([1.0]), TokenRows([np.empty((0, 3), np.uint16)]), np.ones(1, np.int32), 2)
