"""The evaluator: one low-priority CPU process that reads the global model, measures it and exports it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from actors.leader import find_leader, reply_of
from actors.service import Whereabouts, whereabouts
from actors.spec import RunSpec
from app.diloco.codec import get_codec
from app.diloco.fragments import scatter_
from app.learning.data import load
from app.learning.evaluate import EvalResult, evaluate
from app.learning.export import export, generate_sample
from app.learning.model import build_model
from app.run.folder import MODEL
from app.run.mirror import upload
from app.run.remote import patiently
from app.run.storage import open_store

CALL_TIMEOUT_S = 60.0
NICENESS = 15
"""Learners go first."""


@dataclass(frozen=True)
class Evaluation:
    """A measurement of the global model at one consistent version vector."""

    tokens: int
    versions: tuple[int, ...]
    result: EvalResult


@dataclass(frozen=True)
class FinalResult:
    """What the end of a run produces, `model/` aside."""

    first: EvalResult
    """Of Θ⁰, on everything held out."""
    last: Evaluation
    sample: str
    gzip_bits_per_byte: float


class Evaluator:
    """Holds a model of its own and the held-out text."""

    def __init__(self, spec: RunSpec):
        os.nice(NICENESS)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._spec = spec
        self._data = load(spec.fetch_data())
        self._subset = self._data.heldout.spread(spec.config.data.eval_samples)
        self._model: Any = self._build()

    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    def where(self) -> Whereabouts:
        """Node and process; answered while a measurement goes on."""
        return whereabouts()

    def evaluate(self) -> Evaluation:
        """Measure the global model as it is now on the fixed subset."""
        versions, tokens = self._pull()
        return Evaluation(tokens, versions, self._measure(self._subset))

    def finish(self) -> FinalResult:
        """Measure Θ⁰ and the global model on everything held out, write `model/`, and let the model write a sample."""
        config = self._spec.config
        torch.set_num_threads(os.cpu_count() or 1)  # the learners are done
        self._model = self._build()
        first = self._measure(self._data.heldout)
        versions, tokens = self._pull()
        last = Evaluation(tokens, versions, self._measure(self._data.heldout))
        tokenizer = self._data.tokenizer()
        self._export(tokenizer)
        sample = generate_sample(self._model, tokenizer, config.eval.prompt, config.eval.sample_tokens, config.run.seed)
        return FinalResult(first, last, sample, self._data.manifest.gzip_bits_per_byte)

    def _export(self, tokenizer: Any) -> None:
        """Write `model/`; to a store that is away once it is back."""
        spec, folder = self._spec, self._spec.work_dir / MODEL
        export(self._model, tokenizer, folder)
        if not spec.is_local:
            patiently(lambda: upload(folder, open_store(spec.location), MODEL))

    def _build(self) -> Any:
        config = self._spec.config
        return build_model(config.model, self._data.manifest.vocab, config.data.seq_len, config.run.seed)

    def _measure(self, rows: Any) -> EvalResult:
        return evaluate(self._model, rows, self._data.token_bytes, self._spec.config.eval.batch_size)

    def _pull(self) -> tuple[tuple[int, ...], int]:
        syncer = find_leader(self._spec)
        versions, values, tokens = reply_of(self._spec, syncer, syncer.handle.weights.remote(), CALL_TIMEOUT_S)
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        codec = get_codec("fp32")
        for fragment, value in zip(self._spec.layout.fragments, values, strict=True):
            scatter_(fragment, codec.decode(value, fragment.numel), parameters)
        return versions, tokens
