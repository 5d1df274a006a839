"""Tokenizers: byte-level BPE trained on the corpus, raw bytes, or one from a folder or the hub.

Our own two split text into words with one pattern, made of ASCII classes only, so that it means the same to Python's
`re` and to the tokenizer: each distinct word is then encoded once, three times faster than encoding the running text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.config import ConfigError
from app.learning.hub import hub_missing

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
OWN = ("train", "bytes")

_SPACE = r" \t\n\r\f\v"
_LETTER = "A-Za-z_\u0080-\U0010ffff"
# words; numbers; punctuation with the line break and indentation that follow it; other white space
WORDS = (
    rf" ?[{_LETTER}]+| ?[0-9]+| ?[^{_SPACE}{_LETTER}0-9]+(?:\n *(?![^{_SPACE}]))?"
    rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
TRAINING_BYTES = 4_000_000
"""Text that BPE training looks at, spread evenly over the corpus: more changes bytes per token by under 1%."""
COUNT_STEP = 8
"""BPE training sees a word once for each this many occurrences: rare words do not decide merges."""
CACHED_WORDS = 500_000

TokenIds = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def build(spec: str, texts: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `spec` names: "train" on `texts`, "bytes", or a folder or name for AutoTokenizer.

    `vocab` counts the end-of-text token and is for "train" alone. Raises ConfigError when `vocab` cannot hold all
    bytes, when the tokenizer cannot be loaded, or when it has no end-of-text token.
    """
    if spec == "train":
        return _wrapped(_train_bpe(texts, vocab))
    if spec == "bytes":
        return _wrapped(_bytes_tokenizer())
    missing = hub_missing(spec)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec)
    except Exception as error:  # whatever a damaged file or a missing package raises there
        why = f"it can't be loaded from the local cache, and {missing}" if missing else f"cannot be loaded ({error})"
        raise ConfigError("data.tokenizer", spec, why) from error
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise ConfigError("data.tokenizer", spec, "an end-of-text token and a tokenizer.json are needed")
    return tokenizer


def load(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer that `save_pretrained` wrote to `folder`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def encode(tokenizer: PreTrainedTokenizerFast, spec: str, texts: Sequence[str]) -> TokenIds:
    """Encode `texts` into one array of token ids, each text followed by the end-of-text token."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    backend = tokenizer.backend_tokenizer
    eos = np.array([tokenizer.eos_token_id], dtype).tobytes()
    encoded = _encoded_by_words(backend, texts, dtype) if spec in OWN else _encoded(backend, texts, dtype)
    return np.frombuffer(b"".join(part for text in encoded for part in (text, eos)), dtype)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> npt.NDArray[np.int32]:
    """Return the UTF-8 bytes that each token stands for, [V]; special tokens stand for none.

    Exact for byte-level tokenizers, where one character of a token is one byte. Others (SentencePiece) are counted by
    what a token looks like: "▁" as a space, "<0x0A>" as one byte, anything else as its own UTF-8.
    """
    byte_level = '"ByteLevel"' in tokenizer.backend_tokenizer.to_str()
    special = set(tokenizer.all_special_tokens)
    sizes = np.zeros(len(tokenizer), np.int32)
    for token, index in tokenizer.get_vocab().items():
        if token in special:
            continue
        if byte_level:
            sizes[index] = len(token)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            sizes[index] = 1
        else:
            sizes[index] = len(token.replace("▁", " ").encode())
    return sizes


def _encoded_by_words(backend: Tokenizer, texts: Sequence[str], dtype: np.dtype[Any]) -> Iterator[bytes]:
    words_of = re.compile(WORDS).findall
    known: dict[str, bytes] = {}
    for text in texts:
        words = words_of(text)
        if len(known) > CACHED_WORDS:
            known.clear()
        new = [word for word in dict.fromkeys(words) if word not in known]
        for word, encoding in zip(new, backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            known[word] = np.array(encoding.ids, dtype).tobytes()
        yield b"".join(map(known.__getitem__, words))


def _encoded(backend: Tokenizer, texts: Sequence[str], dtype: np.dtype[Any]) -> Iterator[bytes]:
    for start in range(0, len(texts), 256):
        for encoding in backend.encode_batch_fast(list(texts[start : start + 256]), add_special_tokens=False):
            yield np.array(encoding.ids, dtype).tobytes()


def _train_bpe(texts: Sequence[str], vocab: int) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab <= len(alphabet):
        raise ConfigError("data.vocab", vocab, f"a trained tokenizer needs at least {len(alphabet) + 1}")
    stride = max(1, sum(map(len, texts)) // TRAINING_BYTES)
    words_of = re.compile(WORDS).findall
    counts: Counter[str] = Counter()
    for text in texts[::stride]:
        counts.update(words_of(text))
    # a small corpus is taken as it is, otherwise most of its words would be rare
    step = COUNT_STEP if counts.total() > 100_000 else 1
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    words = (word for word, count in counts.items() for _ in range((count + step // 2) // step))
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def _bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids 0 to 255 are the bytes themselves and 256 is the end of text."""
    from tokenizers import Tokenizer, models

    ids = {character: byte for byte, character in enumerate(_byte_characters())}
    return Tokenizer(models.BPE({**ids, EOS: 256}, []))


def _byte_characters() -> list[str]:
    """Return the visible character that byte-level tokenizers write for each byte (as GPT-2's does)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(256 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(256)]


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, clean_up_tokenization_spaces=False
    )
