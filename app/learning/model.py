"""The model: a Llama built from a seed, or any causal language model of Hugging Face."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import psutil
import torch

from app.config import ConfigError, ModelConfig
from app.learning.hub import hub_missing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configurations call it; those of BLOOM, Mamba and other models without a bound have none of them."""


def build_model(model: ModelConfig, vocab: int, seq_len: int, seed: int) -> PreTrainedModel:
    """Return the model in fp32 on the CPU, a function of the arguments alone.

    "llama" is initialised from `seed`, whatever state the global random generator is in; "hf" loads the weights of
    `model.path`. Raises ConfigError when those cannot be loaded, have fewer than `vocab` embeddings or fewer than
    `seq_len` positions, and when a Llama is larger than this machine's memory.
    """
    # forking keeps the caller's random numbers as they are
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _llama(model, vocab, seq_len) if model.name == "llama" else _pretrained(model, vocab, seq_len)


def positions_of(model: PreTrainedModel) -> int | None:
    """Return how many tokens of a text the model can tell apart by their places; None where nothing bounds them."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in POSITION_KEYS)
    return next((count for count in found if isinstance(count, int) and count > 0), None)


def small_init(hidden: int) -> float:
    """Return the standard deviation √(2/(5·hidden)) of initial weights (SmallInit, arXiv 1910.05895).

    Llama's own 0.02 is made for widths in the thousands: at 128 this is 0.056 and trains far faster.
    """
    return math.sqrt(2 / (5 * hidden))


def _llama(model: ModelConfig, vocab: int, seq_len: int) -> PreTrainedModel:
    # the narrow module: `from transformers import …` would look through every model
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    _check_memory(model, vocab)
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


def _check_memory(model: ModelConfig, vocab: int) -> None:
    """Refuse what the system would end this process for. Norms are left out of the count."""
    numbers = vocab * model.hidden + model.layers * model.hidden * (4 * model.hidden + 3 * model.intermediate)
    gigabytes, memory = 4 * numbers / 1e9, psutil.virtual_memory().total / 1e9
    if gigabytes > memory:
        allowed = f"this model's weights would take {gigabytes:,.0f} GB, this machine has {memory:,.0f} GB of memory"
        raise ConfigError("model.hidden", model.hidden, allowed)


def _pretrained(model: ModelConfig, vocab: int, seq_len: int) -> PreTrainedModel:
    missing = hub_missing(str(model.path))
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the terminal belongs to whoever shows the run
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    except Exception as error:  # whatever a damaged file, an unknown architecture or a missing package raises there
        why = f"it can't be loaded from the local cache, and {missing}" if missing else f"cannot be loaded ({error})"
        raise ConfigError("model.path", model.path, why) from error
    rows = loaded.get_input_embeddings().weight.shape[0]
    if rows < vocab:
        raise ConfigError("model.path", model.path, f"{rows} embeddings, but the tokenizer has {vocab} tokens")
    positions = positions_of(loaded)
    if positions is not None and seq_len > positions:
        raise ConfigError("data.seq_len", seq_len, f"at most {positions}, the positions of model.path={model.path}")
    return loaded
