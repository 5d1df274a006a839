"""The trained model as a Hugging Face folder, and a sample of what it writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from app.learning.model import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out_dir: Path) -> None:
    """Write weights (safetensors), configuration and tokenizer to `out_dir`, replacing what is there.

    Written beside it first and then renamed: `out_dir` is never half a model. Needs nothing of this project to load:
    `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` take the folder.
    """
    fresh = out_dir.with_name(f".{out_dir.name}.new")
    old = out_dir.with_name(f".{out_dir.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(str(fresh))
    tokenizer.save_pretrained(str(fresh))
    if out_dir.exists():
        out_dir.rename(old)
    fresh.rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)


def generate_sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int, seed: int
) -> str:
    """Return `prompt` and up to `tokens` tokens that the model goes on with, the same for the same `seed`.

    An empty prompt starts a new text. Prompt and sample together stay within the positions that the model knows;
    a longer prompt loses its beginning. Samples at temperature 0.8 among the
    40 likeliest tokens: at this size the plain distribution wanders off and the likeliest token repeats itself.
    """
    prompt_ids = tokenizer(prompt).input_ids or [tokenizer.eos_token_id]
    limit = positions_of(model) or len(prompt_ids) + tokens
    ids = torch.tensor([prompt_ids[-(limit - 1) :]], device=model.device)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(tokens, limit - ids.shape[1]),
            do_sample=True,
            temperature=0.8,
            top_k=40,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
    model.train(was_training)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
