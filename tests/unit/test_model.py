import pytest
import torch

from app.config import ModelConfig
from app.learning.model import build_model, small_init

SMALL = ModelConfig(hidden=32, layers=1, heads=2, intermediate=48)


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    first = build_model(SMALL, vocab=257, seq_len=16, seed=5).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = build_model(SMALL, vocab=257, seq_len=16, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_model(SMALL, vocab=257, seq_len=16, seed=6).state_dict()
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_embeddings_are_tied_and_all_is_fp32():
    model = build_model(SMALL, vocab=257, seq_len=16, seed=1)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    attention, mlp, norms = 4 * 32 * 32, 3 * 32 * 48, 3 * 32
    assert sum(p.numel() for p in model.parameters()) == 257 * 32 + attention + mlp + norms


def test_the_shipped_model_has_half_a_million_parameters():
    model = build_model(ModelConfig(), vocab=1024, seq_len=128, seed=1)
    assert sum(p.numel() for p in model.parameters()) == 526_976


def test_initial_weights_follow_the_width():
    assert small_init(1000) == pytest.approx(0.02)
    model = build_model(SMALL, vocab=1024, seq_len=16, seed=1)
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(small_init(32), rel=0.02)


def test_a_folder_of_weights_is_loaded_in_fp32(tmp_path):
    saved = build_model(SMALL, vocab=257, seq_len=16, seed=5)
    saved.to(torch.bfloat16).save_pretrained(str(tmp_path))
    loaded = build_model(ModelConfig(name="hf", path=str(tmp_path)), vocab=257, seq_len=16, seed=9)
    expected = saved.float().state_dict()
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_weights_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path"):
        build_model(ModelConfig(name="hf", path=str(tmp_path)), vocab=257, seq_len=16, seed=1)
    build_model(SMALL, vocab=257, seq_len=16, seed=5).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="257 embeddings, but the tokenizer has 300"):
        build_model(ModelConfig(name="hf", path=str(tmp_path)), vocab=300, seq_len=16, seed=1)
