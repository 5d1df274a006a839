"""model=hf from a folder, from the text to the exported model, for architectures that differ in what they know."""

import contextlib
import json
import pydoc_data.topics
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from app.config import ConfigError, DataConfig, ModelConfig, TrainConfig
from app.diloco.fragments import build_layout, gather, scatter_, specs_of
from app.learning import data, tokenizer
from app.learning.evaluate import evaluate
from app.learning.export import export, generate_sample
from app.learning.inner import InnerLoop
from app.learning.model import build_model, positions_of

TOPICS = Path(pydoc_data.topics.__file__).read_text()[:20_000]
POSITIONS = 24
ARCHITECTURES = {
    "gpt2": {"n_positions": POSITIONS, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "mpt": {"max_seq_len": POSITIONS, "d_model": 32, "n_heads": 2, "n_layers": 1},
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
}


def write_texts(folder: Path, kind: str) -> None:
    texts = [TOPICS[i : i + 2000] for i in range(0, len(TOPICS), 2000)]
    if kind == "txt":
        for i, text in enumerate(texts):
            (folder / f"{i}.txt").write_text(text)
    elif kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        datasets.Dataset.from_dict({"text": texts}).to_parquet(str(folder / "rows.parquet"))


def saved(architecture: str, folder: Path) -> str:
    """A folder with a new model of that architecture and a tokenizer, as somebody else would have it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = tokenizer.build("train", [TOPICS], 300)
    special = {"bos_token_id": tokens.eos_token_id, "eos_token_id": tokens.eos_token_id}
    config = AutoConfig.for_model(architecture, vocab_size=300, **special, **ARCHITECTURES[architecture])
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    tokens.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "kind"), [("gpt2", "txt"), ("mpt", "jsonl"), ("bloom", "parquet"), ("mamba", "txt")]
)
def test_from_a_folder_of_text_and_a_model_to_a_model(architecture, kind, tmp_path):
    (tmp_path / "texts").mkdir()
    write_texts(tmp_path / "texts", kind)
    folder = saved(architecture, tmp_path / "given")
    source = DataConfig(source="files", path=str(tmp_path / "texts"), tokenizer=folder, seq_len=16, heldout_share=0.2)
    prepared = data.prepare(source, tmp_path / "data")
    model = build_model(ModelConfig(name="hf", path=folder), prepared.manifest.vocab, source.seq_len, seed=1)

    before = evaluate(model, prepared.heldout, prepared.token_bytes, 64).loss
    loop = InnerLoop(model, TrainConfig())
    for _ in range(4):
        assert not loop.step([prepared.train.take(np.arange(16))], 3e-3, contextlib.nullcontext()).skipped
    after = evaluate(model, prepared.heldout, prepared.token_bytes, 64).loss
    assert after < before

    layout = build_layout(specs_of(model), 2)  # through the fragments into another copy, as the evaluator does it
    copy = build_model(ModelConfig(name="hf", path=folder), prepared.manifest.vocab, source.seq_len, seed=1)
    parameters, own = (dict(m.named_parameters()) for m in (copy, model))
    for fragment in layout.fragments:
        scatter_(fragment, gather(fragment, own), parameters)
    export(copy, prepared.tokenizer(), tmp_path / "model")
    assert generate_sample(copy, prepared.tokenizer(), "def ", 40, seed=1).startswith("def ")

    again = build_model(ModelConfig(name="hf", path=str(tmp_path / "model")), prepared.manifest.vocab, 16, seed=9)
    assert evaluate(again, prepared.heldout, prepared.token_bytes, 64).loss == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(("architecture", "positions"), [("gpt2", 24), ("mpt", 24), ("bloom", None), ("mamba", None)])
def test_a_text_longer_than_the_models_positions_is_refused(architecture, positions, tmp_path):
    model = ModelConfig(name="hf", path=saved(architecture, tmp_path))
    assert positions_of(build_model(model, 300, POSITIONS, seed=1)) == positions
    if positions is None:
        build_model(model, 300, 10_000, seed=1)
        return
    with pytest.raises(ConfigError, match=rf"^data\.seq_len=25 is refused: at most 24, .*{tmp_path}"):
        build_model(model, 300, POSITIONS + 1, seed=1)


def test_a_damaged_file_of_weights_is_refused_in_one_line(tmp_path):
    folder = saved("gpt2", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"^model\.path=.* cannot be loaded \(") as refusal:
        build_model(ModelConfig(name="hf", path=folder), 300, 16, seed=1)
    assert "\n" not in str(refusal.value)


def test_a_model_larger_than_the_memory_is_refused():
    with pytest.raises(ConfigError, match=r"^model\.hidden=1000000 is refused: .* GB of memory"):
        build_model(ModelConfig(hidden=1_000_000), 1024, 16, seed=1)
    assert torch.is_tensor(build_model(ModelConfig(hidden=8, heads=1), 257, 16, seed=1).get_input_embeddings().weight)
