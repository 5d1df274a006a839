"""What a pool says of its learners' batches reaches the weights of the merges."""

import torch
from accelerate.state import AcceleratorState

from app.config import Config, ModelConfig, PoolConfig, TrainConfig
from app.diloco.agenda import Pace
from app.diloco.durable import first_state
from app.diloco.fragments import build_layout, specs_of
from app.diloco.process import Body, SteppedLearner
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from app.diloco.shadow import restore
from app.diloco.stepped import SteppedFleet
from app.learning.inner import InnerLoop
from app.learning.model import build_model

SEQ = 16
CONFIG = Config(
    learners=2,
    model=ModelConfig(hidden=32, layers=1, heads=2, intermediate=48),
    train=TrainConfig(batch_size=4, precision="fp32"),
    diloco=DilocoSettings(fragments=2, sync_interval=4, overlap_steps=1, min_quorum=2),
    pools={"fast": PoolConfig(min_learners=1), "slow": PoolConfig(batch_size=2, accumulation=3)},
)


def learner(name: str) -> SteppedLearner:
    train = CONFIG.pool_of(name).train
    model = build_model(CONFIG.model, 64, SEQ, seed=1)
    loop = InnerLoop(model, train)
    generator = torch.Generator().manual_seed(CONFIG.learner_ids.index(name))

    def inner_step(replica: Replica, _: int) -> float:
        batches = torch.randint(0, 64, (train.batch_size * train.accumulation, SEQ), generator=generator)
        parts = batches.split(train.batch_size)
        return loop.step(parts, 1e-3, replica.writing(sum(part.numel() for part in parts))).loss

    return SteppedLearner(name, lambda: Body(dict(model.named_parameters()), inner_step), Pace(step_s=1.0))


def test_token_weights_follow_each_pools_batch_and_accumulation() -> None:
    learners = [learner(name) for name in CONFIG.learner_ids]
    model = build_model(CONFIG.model, 64, SEQ, seed=1)
    layout = build_layout(specs_of(model), CONFIG.diloco.fragments)
    state = first_state("run", layout, dict(model.named_parameters()))
    fleet = SteppedFleet(restore("run", 1, layout, CONFIG.diloco, 10**9, state, []), learners)
    for _ in range(16):
        fleet.advance()
    AcceleratorState._reset_state(reset_partial_state=True)
    merges = [note.fields["contains"] for note in fleet.notes if note.kind == "merge"]
    assert len(merges) >= 6
    for fast, slow in merges:
        assert fast["c_steps"] == slow["c_steps"] > 0
        for entry, rows in ((fast, 4), (slow, 2 * 3)):
            assert entry["c_tokens"] == entry["c_steps"] * rows * SEQ
            assert entry["weight"] == entry["c_tokens"] * entry["c_tokens"] / entry["c_steps"]
        assert slow["weight"] / fast["weight"] == (6 / 4) ** 2
