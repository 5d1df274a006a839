"""Which optimizer trains which parameter, and that each does what its formula says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.config import ModelConfig, TrainConfig
from app.learning.model import build_model
from app.learning.optimizer import build_optimizers

CONFIG = TrainConfig(optimizer="muon", lr=0.01, weight_decay=0.1, precision="fp32")


def small_model():
    return build_model(ModelConfig(name="llama", hidden=32, layers=1, heads=2, intermediate=88), 64, 32, seed=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trained_parameter_is_in_one_optimizer(optimizer):
    model = small_model()
    model.model.norm.weight.requires_grad_(False)
    optimizers = build_optimizers(model, replace(CONFIG, optimizer=optimizer))
    held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_muon_trains_the_matrices_that_are_no_embeddings():
    model = small_model()
    muon, adamw = build_optimizers(model, CONFIG)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    by_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in by_muon}
    assert names == {name for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name}
    decay = {id(p): group["weight_decay"] for o in (muon, adamw) for group in o.param_groups for p in group["params"]}
    assert all(decay[id(p)] == (0.1 if p.dim() >= 2 else 0.0) for p in model.parameters())


def test_a_muon_step_is_orthogonal_and_of_adamw_s_size():
    """Δ = −lr · 0.2 · √max(rows, columns) · U Vᵀ of the momentum's SVD, up to Newton-Schulz; decay apart."""
    model = small_model()
    muon, _ = build_optimizers(model, replace(CONFIG, weight_decay=0.0))
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone().double()
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    u, _, v = np.linalg.svd(weight.grad.double().numpy(), full_matrices=False)
    muon.step()
    moved = (weight.detach().double() - before).numpy() / (-0.01 * 0.2 * np.sqrt(max(weight.shape)))
    singular = np.linalg.svd(moved, compute_uv=False)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    assert np.sum(moved * (u @ v)) / (np.linalg.norm(moved) * np.linalg.norm(u @ v)) > 0.95


def test_a_model_of_vectors_alone_needs_no_muon():
    vectors = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(3))})
    (adamw,) = build_optimizers(vectors, CONFIG)
    assert isinstance(adamw, torch.optim.AdamW)
