"""A whole training run in one process, learners stepped in turn: quality depends on the order of events, not on time.

Drives the same protocol, replicas and inner loops as the actors do, with virtual time. `train_data_parallel` is the
baseline: the same loop on the mean gradient of all learners' batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.config import Config
from app.diloco.agenda import Pace
from app.diloco.fragments import build_layout, gather, scatter_, specs_of
from app.diloco.process import Body, SteppedLearner
from app.diloco.protocol import Protocol
from app.diloco.replica import Replica
from app.diloco.state import GlobalFragment
from app.diloco.stepped import SteppedFleet
from app.learning.blocks import Permutation
from app.learning.data import PreparedData, prepare
from app.learning.evaluate import evaluate
from app.learning.inner import InnerLoop
from app.learning.model import build_model
from app.learning.schedule import learning_rate

NO_BUDGET = 10**15
"""The caller ends the run: all learners have made the same steps then."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    loss: float
    """Nats per token on all held-out rows."""
    bits_per_byte: float
    tokens: int
    merges: int
    discarded_share: float
    """Discarded work, that overwritten in flight included, as a share of the processed."""
    contributors: float
    """Mean contributors of a merge; 0 without merges."""


def train_decoupled(config: Config, data_folder: Path) -> Outcome:
    """Train `config.learners` learners in lockstep to the token budget, and evaluate the global model."""
    data = prepare(config.data, data_folder)
    model = _model(config, data)
    parameters = _trained(model)
    protocol = _protocol(config, model)
    rows = _steps_of_rows(config, len(data.train))
    learners = [_learner(config, data, name, rows) for name in config.learner_ids]
    fleet = SteppedFleet(protocol, learners)
    while protocol.books.tokens < config.train.tokens:
        fleet.advance()
    fleet.finish()
    for layout, fragment in zip(protocol.layout.fragments, protocol.fragments, strict=True):
        scatter_(layout, fragment.theta, parameters)
    balance = protocol.books.balance()
    if not balance.exact:
        raise AssertionError(f"the fates of work do not balance: {balance}")
    merges = [note.fields for note in fleet.notes if note.kind == "merge"]
    return _outcome(
        config,
        data,
        model,
        tokens=balance.processed // balance.parameters,
        merges=len(merges),
        discarded_share=sum(balance.discarded.values()) / balance.processed,
        contributors=sum(len(merge["contains"]) for merge in merges) / max(1, len(merges)),
    )


def train_data_parallel(config: Config, data_folder: Path) -> Outcome:
    """Train one model on the mean gradient of the batches that `config.learners` workers would have taken."""
    data = prepare(config.data, data_folder)
    model = _model(config, data)
    loop = InnerLoop(model, config.train)
    rows = _steps_of_rows(config, len(data.train))
    tokens = 0
    while tokens < config.train.tokens:
        batches = [b for _ in config.learner_ids for b in _batches(config, data, next(rows))]
        tokens += loop.step(batches, learning_rate(tokens, config.train), contextlib.nullcontext()).tokens
    return _outcome(config, data, model, tokens=tokens, merges=0, discarded_share=0.0, contributors=0.0)


def _model(config: Config, data: PreparedData) -> Any:
    return build_model(config.model, data.manifest.vocab, config.data.seq_len, config.run.seed)


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _protocol(config: Config, model: torch.nn.Module) -> Protocol:
    layout = build_layout(specs_of(model), config.diloco.fragments)
    parameters = _trained(model)
    fragments = []
    for fragment in layout.fragments:
        theta = gather(fragment, parameters)
        values = (theta, theta.clone(), torch.zeros(fragment.numel))
        fragments.append(GlobalFragment.restored(fragment.index, 0, 0, values, config.diloco))
    return Protocol(
        run_id="stepped", epoch=1, layout=layout, settings=config.diloco, budget=NO_BUDGET, fragments=fragments
    )


def _learner(config: Config, data: PreparedData, name: str, rows: Iterator[npt.NDArray[np.int64]]) -> SteppedLearner:
    def start() -> Body:
        model = _model(config, data)
        loop = InnerLoop(model, config.train)

        def inner_step(replica: Replica, tokens: int) -> float:
            batches = _batches(config, data, next(rows))
            count = sum(batch.numel() for batch in batches)
            lr = learning_rate(tokens, config.train)
            result = loop.step(batches, lr, replica.writing(count))
            if result.skipped:
                replica.skip_step()
            return result.loss

        return Body(_trained(model), inner_step)

    return SteppedLearner(name, start, Pace())


def _steps_of_rows(config: Config, samples: int) -> Iterator[npt.NDArray[np.int64]]:
    """The samples of one learner's step after the other, int64 [B · accumulation], in the run's permutation."""
    permutation = Permutation(config.run.seed, samples, config.data.block_samples)
    count = config.train.batch_size * config.train.accumulation
    waiting = np.empty(0, dtype=np.int64)
    epoch = 0
    while True:
        for block in range(permutation.blocks):
            waiting = np.concatenate([waiting, permutation.indices(epoch, block)])
            while len(waiting) >= count:
                yield waiting[:count]
                waiting = waiting[count:]
        epoch += 1


def _batches(config: Config, data: PreparedData, rows: npt.NDArray[np.int64]) -> list[torch.Tensor]:
    return list(data.train.take(rows).split(config.train.batch_size))


def _outcome(config: Config, data: PreparedData, model: Any, **figures: Any) -> Outcome:
    result = evaluate(model, data.heldout, data.token_bytes, config.eval.batch_size)
    return Outcome(loss=result.loss, bits_per_byte=result.bits_per_byte, **figures)
