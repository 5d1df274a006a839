import json
import subprocess
import sys

import pytest
import torch

from app.config import ModelConfig
from app.learning import tokenizer
from app.learning.export import export, generate_sample
from app.learning.model import build_model

SMALL = ModelConfig(hidden=32, layers=1, heads=2, intermediate=48)

LOADER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("def ", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=5, do_sample=False)
assert not [m for m in sys.modules if m == "app" or m.startswith("app.")]
print(json.dumps({
    "ids": inputs.input_ids[0].tolist(),
    "text": tokenizer.decode(inputs.input_ids[0]),
    "new": output.shape[1] - inputs.input_ids.shape[1],
    "eos": [tokenizer.eos_token, model.config.eos_token_id, tokenizer.eos_token_id],
    "logits": model(**inputs).logits[0, -1, :4].tolist(),
}))
"""


@pytest.fixture(scope="module")
def tokens():
    return tokenizer.build("bytes", [], 0)


def small_model(seed: int = 1):
    return build_model(SMALL, vocab=257, seq_len=32, seed=seed)


@pytest.mark.timeout(120)  # a second process imports transformers, which a busy machine may take long over
def test_a_process_with_transformers_alone_loads_it_and_generates(tokens, tmp_path):
    model = small_model()
    export(model, tokens, tmp_path / "model")
    loaded = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "model")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    said = json.loads(loaded.stdout.splitlines()[-1])
    assert said["ids"] == list(b"def ")
    assert said["text"] == "def "
    assert 1 <= said["new"] <= 5
    assert said["eos"] == ["<|endoftext|>", 256, 256]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([said["ids"]])).logits[0, -1, :4]
    torch.testing.assert_close(torch.tensor(said["logits"]), logits, rtol=1e-4, atol=1e-5)


def test_export_replaces_what_was_there_and_leaves_nothing_beside_it(tokens, tmp_path):
    out = tmp_path / "model"
    export(small_model(1), tokens, out)
    (tmp_path / ".model.new").mkdir()  # left by one that was killed
    (out / "stale").touch()
    export(small_model(2), tokens, out)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert not (out / "stale").exists()
    assert (out / "model.safetensors").exists()
    loaded = build_model(ModelConfig(name="hf", path=str(out)), vocab=257, seq_len=32, seed=0)
    expected = small_model(2).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_a_sample_depends_on_its_seed_alone_and_starts_with_the_prompt(tokens):
    model = small_model().train()
    torch.manual_seed(1)
    first = generate_sample(model, tokens, "def ", 8, seed=3)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert generate_sample(model, tokens, "def ", 8, seed=3) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert generate_sample(model, tokens, "def ", 8, seed=4) != first
    assert first.startswith("def ")
    assert model.training


def test_a_sample_stays_within_the_models_positions(tokens):
    sample = generate_sample(small_model(), tokens, "x" * 40, 500, seed=3)
    assert sample.startswith("x" * 31)
    assert len(tokens(sample).input_ids) <= 3 * 32  # bytes that are no UTF-8 become three


def test_a_sample_needs_no_prompt(tokens):
    assert generate_sample(small_model(), tokens, "", 8, seed=3)
