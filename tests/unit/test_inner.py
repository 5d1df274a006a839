import copy
import threading
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.nn import functional

from app.config import ModelConfig, TrainConfig
from app.learning.inner import InnerLoop
from app.learning.loss import next_token_loss
from app.learning.model import build_model
from app.learning.trainable import wants_bf16

SMALL = ModelConfig(hidden=32, layers=1, heads=2, intermediate=48)
CONFIG = TrainConfig(optimizer="adamw", tokens=10_000, lr=1e-2, warmup_tokens=0, precision="fp32")


@pytest.fixture(autouse=True)
def _one_accelerator_a_test():
    # a process has one precision; tests of several share a process
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def small_model():
    return build_model(SMALL, vocab=64, seq_len=16, seed=1)


def batch(seed: int, size: int = 4) -> torch.Tensor:
    return torch.randint(0, 64, (size, 16), generator=torch.Generator().manual_seed(seed))


def weights(model) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


class SpyLock:
    """Notes what the weights are when the lock is taken and when it is given back."""

    def __init__(self, model) -> None:
        self.model, self.taken, self.given_back = model, None, None

    def __enter__(self):
        self.taken = weights(self.model)

    def __exit__(self, *_):
        self.given_back = weights(self.model)


def test_loss_is_the_mean_over_predicted_tokens():
    model, rows = small_model(), batch(1)
    logits = model(input_ids=rows).logits.double()
    picked = functional.log_softmax(logits[:, :-1], -1).gather(2, rows[:, 1:, None])
    assert next_token_loss(model, rows).item() == pytest.approx(-picked.mean().item(), rel=1e-6)


def test_steps_equal_plain_adamw_with_clipping_and_decay_on_matrices_only():
    model, plain = small_model(), small_model()
    loop = InnerLoop(model, CONFIG)
    decay = [p for p in plain.parameters() if p.dim() > 1]
    rest = [p for p in plain.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    for step, lr in enumerate((1e-2, 5e-3, 1e-3)):
        result = loop.step([batch(step)], lr, threading.Lock())
        loss = plain(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        adamw.zero_grad()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert (result.tokens, result.skipped) == (64, False)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_it_learns():
    loop = InnerLoop(small_model(), CONFIG)
    losses = [loop.step([batch(0)], 1e-2, threading.Lock()).loss for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_accumulated_batches_are_one_larger_batch():
    whole, parts = small_model(), small_model()
    both = batch(3, 8)
    one = InnerLoop(whole, CONFIG).step([both], 1e-2, threading.Lock())
    two = InnerLoop(parts, CONFIG).step([both[:4], both[4:]], 1e-2, threading.Lock())
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert two.tokens == one.tokens == 128
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, rtol=1e-3, atol=1e-5)


def test_batches_of_different_sizes_are_one_larger_batch():
    """Against float64: a mean of the batches' means would give the samples of small ones too much weight."""
    sizes, rows = (1, 5, 2), batch(3, 8)
    model, exact = small_model(), small_model().double()
    result = InnerLoop(model, CONFIG).step(list(rows.split(sizes)), 1e-2, threading.Lock())
    logits = exact(input_ids=rows).logits
    loss = -functional.log_softmax(logits[:, :-1], -1).gather(2, rows[:, 1:, None]).mean()
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in exact.parameters()]))
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert result.tokens == 128


def test_weights_change_only_while_the_lock_is_held():
    model = small_model()
    loop, before = InnerLoop(model, CONFIG), weights(model)
    lock = SpyLock(model)
    loop.step([batch(1)], 1e-2, lock)
    after = weights(model)
    assert all(torch.equal(lock.taken[n], before[n]) for n in before)
    assert all(torch.equal(lock.given_back[n], after[n]) for n in after)
    assert any(not torch.equal(before[n], after[n]) for n in after)


def test_a_lock_that_another_thread_holds_stops_the_writing_alone():
    model = small_model()
    loop, before, lock = InnerLoop(model, CONFIG), weights(model), threading.Lock()
    reached = threading.Event()

    class Announcing:
        def __enter__(self):
            reached.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    with lock:
        stepping = threading.Thread(target=loop.step, args=([batch(1)], 1e-2, Announcing()))
        stepping.start()
        assert reached.wait(30)  # forward and backward went through without the lock
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    stepping.join(30)
    assert any(not torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(poison):
    model, undisturbed = small_model(), small_model()
    loop, other = InnerLoop(model, CONFIG), InnerLoop(undisturbed, CONFIG)
    for each in (loop, other):
        each.step([batch(0)], 1e-2, threading.Lock())
    norm = model.model.norm.weight
    with torch.no_grad():
        good, norm[3] = norm[3].clone(), poison
    result = loop.step([batch(1)], 1e-2, threading.Lock())
    assert result.skipped
    assert result.tokens == 64
    with torch.no_grad():
        norm[3] = good
    for each in (loop, other):
        assert not each.step([batch(2)], 1e-2, threading.Lock()).skipped
    for name, value in undisturbed.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_the_optimizer_goes_on_from_its_state():
    model, resumed = small_model(), small_model()
    loop = InnerLoop(model, CONFIG)
    loop.step([batch(0)], 1e-2, threading.Lock())
    resumed.load_state_dict(weights(model))
    other = InnerLoop(resumed, CONFIG)
    other.load_optimizer_state(copy.deepcopy(loop.optimizer_state()))
    for each in (loop, other):
        each.step([batch(1)], 1e-2, threading.Lock())
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


def test_bf16_computes_in_bf16_on_fp32_master_weights():
    model = small_model()
    loop = InnerLoop(model, replace(CONFIG, precision="bf16"))
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    result = loop.step([batch(0)], 1e-2, threading.Lock())
    assert seen == [torch.bfloat16]
    assert not result.skipped
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    moments = [s["exp_avg"] for s in loop.optimizer_state()[0]["state"].values()]
    assert {m.dtype for m in moments} == {torch.float32}


@pytest.mark.parametrize(
    ("precision", "cuda", "bf16", "wanted"),
    [
        ("fp32", True, True, False),
        ("bf16", False, False, True),
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, False, False),
    ],
)
def test_auto_precision_follows_the_device(monkeypatch, precision, cuda, bf16, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    assert wants_bf16(precision) is wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_model_moves_there_and_auto_means_bf16():
    model = small_model()
    loop = InnerLoop(model, replace(CONFIG, precision="auto"))
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    losses = [loop.step([batch(0)], 1e-2, threading.Lock()).loss for _ in range(40)]
    assert loop.device.type == "cuda"
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert set(seen) == {torch.bfloat16}
    assert losses[-1] < 0.5 * losses[0]
