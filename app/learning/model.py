"""The model: a Llama built from a seed, or any causal language model of Hugging Face."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from app.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(model: ModelConfig, vocab: int, seq_len: int, seed: int) -> PreTrainedModel:
    """Return the model in fp32 on the CPU, a function of the arguments alone.

    "llama" is initialised from `seed`, whatever state the global random generator is in; "hf" loads the weights of
    `model.path`. Raises ValueError when those cannot be loaded or have fewer than `vocab` embeddings.
    """
    # forking keeps the caller's random numbers as they are
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _llama(model, vocab, seq_len) if model.name == "llama" else _pretrained(model, vocab)


def small_init(hidden: int) -> float:
    """Return the standard deviation √(2/(5·hidden)) of initial weights (SmallInit, arXiv 1910.05895).

    Llama's own 0.02 is made for widths in the thousands: at 128 this is 0.056 and trains far faster.
    """
    return math.sqrt(2 / (5 * hidden))


def _llama(model: ModelConfig, vocab: int, seq_len: int) -> PreTrainedModel:
    # the narrow module: `from transformers import …` would look through every model
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        initializer_range=small_init(model.hidden),
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def _pretrained(model: ModelConfig, vocab: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={model.path}: cannot be loaded ({' '.join(str(error).split())})") from error
    rows = loaded.get_input_embeddings().weight.shape[0]
    if rows < vocab:
        raise ValueError(f"model.path={model.path}: {rows} embeddings, but the tokenizer has {vocab} tokens")
    return loaded
