"""One learner with one fragment and no syncer: offers are made by hand."""

import torch

from app.diloco.codec import digest, get_codec
from app.diloco.messages import Ask, Contained, Offer, Sender, Welcome
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from tests.unit.tiny import RUN, tiny_layout, tiny_parameters

NUMEL = tiny_layout(1).fragments[0].numel


def value(level: float) -> torch.Tensor:
    return torch.full((NUMEL,), level)


def full(version: int, level: float, *mine: tuple[int, int], epoch: int = 1, clock: int = 0) -> Offer:
    """A full fragment with all values `level`; `mine` are (epoch, round) of own work that it contains."""
    entries = tuple(Contained("a", 1, e, r, version - 1, version, 1, 1, 1.0) for e, r in mine)
    theta = value(level)
    return Offer(0, version, epoch, clock, None, "fp32", get_codec("fp32").encode(theta), digest(theta), entries)


def replica_of(adopt: str, **dials: object) -> Replica:
    settings = DilocoSettings(fragments=1, adopt=adopt, **dials)  # type: ignore[arg-type]
    welcome = Welcome(Sender(RUN, 1, "a", 1), 7, (full(0, 0.0),), 0)
    return Replica(tiny_layout(1), settings, tiny_parameters(5), welcome)


def steps(replica: Replica, count: int, tokens: int = 10, change: float = 1.0) -> None:
    for _ in range(count):
        with replica.writing(tokens):
            for tensor in replica._weights.tensors.values():
                tensor += change


def capture(replica: Replica, round_: int, version: int, epoch: int = 1) -> None:
    for ask in replica.hear(epoch, (Ask(0, round_, epoch, version),)):
        replica.contribute(ask, 1.0, 0.0, False)


def level(replica: Replica) -> float:
    levels = {float(x) for tensor in replica._weights.tensors.values() for x in tensor.flatten()}
    assert len(levels) == 1
    return levels.pop()


def adopt(replica: Replica, offer: Offer) -> None:
    assert replica.receive(offer)
    replica.adopt()


def books(replica: Replica) -> tuple[int, int, dict[str, int], int]:
    """c_tokens, c_steps, discarded, outstanding of the one fragment."""
    held = replica.fragments[0]
    return held.c_tokens, held.c_steps, held.discarded, held.outstanding
