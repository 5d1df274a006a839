"""A whole training run in one process, in virtual time: quality depends on the order of events, not on the clock.

Drives the same protocol, replicas and inner loops as the actors do; paces, delays and deaths come from a schedule.
`train_data_parallel` is the baseline: the same loop on the mean gradient of all learners' batches.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.config import Config, Pool
from app.config.roster import extra_learner
from app.diloco.agenda import Kill, Pace, kills_every
from app.diloco.average import average_weight, averaged
from app.diloco.fragments import build_layout, gather, scatter_, specs_of
from app.diloco.handing_in import LEFT
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
from app.learning.moments import packed
from app.learning.schedule import learning_rate, rejoin_factor

NO_BUDGET = 10**15
"""The caller ends the run, after the moment in which the budget is reached."""


@dataclass(frozen=True)
class Schedule:
    """How time passes, in virtual seconds. As it stands all learners step together and nothing takes time."""

    step_s: float = 0.125
    """An inner step of a learner whose pool has no slowdown: about that of the default run on two cores."""
    delay_s: float = 0.0
    """A message between a learner and the syncer, each way."""
    jitter_s: float = 0.0
    """A message takes up to this much longer."""
    merge_s: float = 0.0
    """From the end of a round until its version is offered."""
    adopt_on_arrival: bool = False
    """Adopt at the first step boundary after arrival, as the actors do; without it τ own steps after the capture."""
    kill_every_s: float = 0.0
    """A learner drawn by the run's seed dies this often; 0 means never."""
    notice_s: float = 1.0
    """From a death until the syncer is told."""
    away_s: float = 19.0
    """From a death until the learner's next process trains."""
    borrowed: int = 0
    """More learners of the first pool, which come and leave again in the middle of the run."""
    borrowed_from: float = 0.367
    """They come when this share of the token budget is processed,"""
    borrowed_until: float = 0.633
    """and leave when this share is: with three times as many more learners, 0.8 of the wall time are left."""


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
    deaths: int
    virtual_s: float
    """Virtual seconds until the token budget was reached."""


OnStep = Callable[[str, int, int, float], None]
"""Learner, incarnation, steps of it by now, loss."""


def train_decoupled(
    config: Config, data_folder: Path, schedule: Schedule, on_step: OnStep = lambda *_: None
) -> Outcome:
    """Train `config.learners` learners to the token budget, and evaluate the global model.

    A learner's pool gives its batches and its slowdown; `on_step` hears of every step as it is made. Raises
    AssertionError when the fates of work do not balance.
    """
    data = prepare(config.data, data_folder)
    model = _model(config, data)
    parameters = _trained(model)
    protocol = _protocol(config, model)
    samples = Samples(config, len(data.train))
    loops: dict[str, tuple[InnerLoop, Replica]] = {}
    fleet = SteppedFleet(
        protocol,
        [_learner(config, data, name, samples, schedule, loops, on_step) for name in config.learner_ids],
        merge_s=schedule.merge_s,
        kills=_kills(config, schedule),
        adopt_on_arrival=schedule.adopt_on_arrival,
        chance=random.Random(config.run.seed),
    )
    pool = next(iter(config.pools))
    names = [extra_learner(pool, k) for k in range(schedule.borrowed)]
    more = [_learner(config, data, name, samples, schedule, loops, on_step, late=True) for name in names]
    while (tokens := protocol.books.tokens) < config.train.tokens:
        if more and tokens >= schedule.borrowed_from * config.train.tokens:
            for learner in more:
                fleet.join(learner)
            more = []
        if names and not more and tokens >= schedule.borrowed_until * config.train.tokens:
            for name in names:
                fleet.send_away(name)
            names = []
        fleet.advance()
    virtual_s = fleet.now
    fleet.finish()
    for layout, fragment in zip(protocol.layout.fragments, protocol.fragments, strict=True):
        scatter_(layout, fragment.average, parameters)
    balance = protocol.books.balance()
    if not balance.exact or balance.outstanding:
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
        deaths=sum(note.kind == "leave" and note.fields["reason"] != LEFT for note in fleet.notes),
        virtual_s=virtual_s,
    )


def train_data_parallel(config: Config, data_folder: Path, schedule: Schedule) -> Outcome:
    """Train one model on the mean gradient of the batches that `config.learners` workers would have taken.

    Nobody dies and the all-reduce takes no time; the slowest worker sets the pace. With `diloco.average` the weights
    are averaged once in H steps, as a syncer that follows them does; their last ones weigh no more than that, unless
    `diloco.last_round=mean`.
    """
    data = prepare(config.data, data_folder)
    model = _model(config, data)
    loop = InnerLoop(model, config.train)
    samples = Samples(config, len(data.train))
    pools = [config.pool_of(name) for name in config.learner_ids]
    average = [parameter.detach().clone() for parameter in loop.parameters]
    tokens = steps = averaged_at = 0
    while tokens < config.train.tokens:
        batches = [batch for pool in pools for batch in _batches(data, samples, pool)]
        tokens += loop.step(batches, learning_rate(tokens, config.train), contextlib.nullcontext()).tokens
        steps += 1
        last = tokens >= config.train.tokens
        if last or steps % config.diloco.sync_interval == 0:
            weight = average_weight(config.diloco, averaged_at, steps, last and config.diloco.last_round == "mean")
            average = [averaged(a, p.detach().clone(), weight) for a, p in zip(average, loop.parameters, strict=True)]
            averaged_at = steps
    with torch.no_grad():
        for parameter, value in zip(loop.parameters, average, strict=True):
            parameter.copy_(value)
    virtual_s = steps * schedule.step_s * max(pool.settings.slowdown for pool in pools)
    none = {"merges": 0, "discarded_share": 0.0, "contributors": 0.0, "deaths": 0}
    return _outcome(config, data, model, tokens=tokens, virtual_s=virtual_s, **none)


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
        values = (theta, theta.clone(), torch.zeros(fragment.numel), theta)
        fragments.append(GlobalFragment.restored(fragment.index, 0, 0, values, config.diloco))
    return Protocol(
        run_id="stepped", epoch=1, layout=layout, settings=config.diloco, budget=NO_BUDGET, fragments=fragments
    )


def _learner(
    config: Config,
    data: PreparedData,
    name: str,
    samples: Samples,
    schedule: Schedule,
    loops: dict[str, tuple[InnerLoop, Replica]],
    on_step: OnStep,
    late: bool = False,
) -> SteppedLearner:
    """`loops`: those at work, to get moments from and be found in. `late`: it joins a run under way."""
    pool = config.pool_of(name)

    def start() -> Body:
        model = _model(config, data)
        loop = InnerLoop(model, pool.train)
        own = loops.pop(name, (None, None))[0]
        under_way = late or own is not None
        fresh = under_way and not _recovered(loop, pool.train.recovery, own, loops)

        def inner_step(replica: Replica, tokens: int) -> float:
            loops[name] = loop, replica
            batches = _batches(data, samples, pool)
            lr = learning_rate(tokens, pool.train)
            if fresh:
                lr *= rejoin_factor(replica.steps, pool.train.rejoin_warmup_steps)
            result = loop.step(batches, lr, replica.writing(sum(batch.numel() for batch in batches)))
            if result.skipped:
                replica.skip_step()
            on_step(name, replica.sender.incarnation, replica.steps, result.loss)
            return result.loss

        return Body(_trained(model), inner_step)

    pace = Pace(schedule.step_s * pool.settings.slowdown, schedule.delay_s, schedule.jitter_s)
    return SteppedLearner(name, start, pace)


def _recovered(
    loop: InnerLoop, policy: str, own: InnerLoop | None, loops: Mapping[str, tuple[InnerLoop, Replica]]
) -> bool:
    """Give a process that joins a run under way the moments that the policy says; False when there are none.

    `own`: what its learner had before.
    """
    donor = own if policy == "checkpoint" else None
    if policy == "peer" and loops:
        donor = max(loops.values(), key=lambda entry: entry[1].steps)[0]
    if donor is not None:
        loop.take_moments(packed(donor.moments()))
    return donor is not None


def _kills(config: Config, schedule: Schedule) -> Iterator[Kill]:
    if not schedule.kill_every_s:
        return iter(())
    chance = random.Random(config.run.seed)
    return kills_every(schedule.kill_every_s, config.learner_ids, schedule.notice_s, schedule.away_s, chance)


class Samples:
    """The run's permutation of the samples, handed out in the order in which steps are made.

    What a learner that died had taken is not handed out again.
    """

    def __init__(self, config: Config, samples: int):
        self._permutation = Permutation(config.run.seed, samples, config.data.block_samples)
        self._waiting = np.empty(0, dtype=np.int64)
        self._block = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next samples, int64 [count]."""
        while len(self._waiting) < count:
            epoch, block = divmod(self._block, self._permutation.blocks)
            self._waiting = np.concatenate([self._waiting, self._permutation.indices(epoch, block)])
            self._block += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


def _batches(data: PreparedData, samples: Samples, pool: Pool) -> list[torch.Tensor]:
    """One step's batches of all workers of a learner, each int64 [B, S]."""
    count = pool.train.batch_size * pool.train.accumulation * pool.settings.workers_per_learner
    return list(data.train.take(samples.take(count)).split(pool.train.batch_size))


def _outcome(config: Config, data: PreparedData, model: Any, **figures: Any) -> Outcome:
    result = evaluate(model, data.heldout, data.token_bytes, config.eval.batch_size)
    return Outcome(loss=result.loss, bits_per_byte=result.bits_per_byte, **figures)
