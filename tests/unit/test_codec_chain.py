"""Low-bit codecs in the protocol: every learner holds the syncer's Θ̂ to the bit, however its offers came."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from app.diloco.agenda import Pace
from app.diloco.codec import digest, get_codec, payload_digest
from app.diloco.codecs.blocks import BLOCK_CODECS
from app.diloco.durable import first_state
from app.diloco.fragments import TensorSpec, build_layout
from app.diloco.job import decode_contribution
from app.diloco.messages import Offer
from app.diloco.process import Body, SteppedLearner
from app.diloco.replica import Replica
from app.diloco.settings import CODECS, DilocoSettings
from app.diloco.shadow import restore
from app.diloco.stepped import SteppedFleet
from tests.unit.lone import NUMEL
from tests.unit.tiny import RUN, Hand, opened, tiny_layout

SPECS = [
    TensorSpec("emb", (53, 7), True),
    TensorSpec("w", (33, 5), False),
    TensorSpec("v", (11, 13), False),
    TensorSpec("b", (19,), False),
]
BLOCK = 16
FULL = 4 * NUMEL


def parameters(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def toward(target: dict[str, torch.Tensor], rate: float = 0.05) -> Callable[[Replica, int], float]:
    def inner_step(replica: Replica, _: int) -> float:
        with replica.writing(10):
            for name, tensor in replica._weights.tensors.items():
                tensor += rate * (target[name] - tensor)
        return 0.0

    return inner_step


def fleet_of(learners: int, codec: str, **dials: Any) -> SteppedFleet:
    settings = DilocoSettings(
        **({"fragments": 3, "sync_interval": 6, "codec_up": codec, "codec_down": codec, "codec_block": BLOCK} | dials)
    )
    layout = build_layout(SPECS, settings.fragments)
    protocol = restore(RUN, 1, layout, settings, 10**9, first_state(RUN, layout, parameters(0)), [])
    # All pull to one place, each from its own side: they agree on it, and on nothing else.
    ends = [{k: v + 0.1 * parameters(10 + m)[k] for k, v in parameters(5).items()} for m in range(learners)]
    starts = [partial(Body, parameters(99), toward(end)) for end in ends]
    return SteppedFleet(protocol, [SteppedLearner(f"l{m}", start, Pace()) for m, start in enumerate(starts)])


def distance(fleet: SteppedFleet) -> float:
    """Of Θ̂ from where all pull to, relative to where it began."""
    layout = fleet.protocol.layout
    values = torch.cat([f.theta_hat for f in fleet.protocol.fragments])
    ends, starts = (
        torch.cat([f.theta_hat for f in restore(RUN, 1, layout, fleet.protocol.settings, 1, state, []).fragments])
        for state in (first_state(RUN, layout, parameters(5)), first_state(RUN, layout, parameters(0)))
    )
    return float((values - ends).norm() / (starts - ends).norm())


@pytest.mark.parametrize("learners", [1, 2, 5])
@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize(
    ("adopt", "feedback"), [("overwrite", False), ("overwrite", True), ("mix", True), ("rebase", False)]
)
def test_all_hold_the_syncer_s_value_to_the_bit(learners: int, codec: str, adopt: str, feedback: bool) -> None:
    fleet = fleet_of(learners, codec, adopt=adopt, error_feedback=feedback)
    exact = fleet_of(learners, "fp32", adopt=adopt)
    compared = 0
    for _ in range(90):
        exact.advance()
        fleet.advance()
        for replica in fleet.replicas.values():
            assert replica.report(1.0, 0.0, False).need_full == ()
            for held, fragment in zip(replica.fragments, fleet.protocol.fragments, strict=True):
                if held.version == fragment.version > 0:
                    assert torch.equal(held.base, fragment.theta_hat)
                    assert digest(held.base) == fragment.digest
                    compared += 1
    assert compared > 100
    assert fleet.protocol.refusals == {}
    for fragment in fleet.protocol.fragments:
        error = (fragment.theta - fragment.theta_hat).norm() / fragment.theta.norm()
        assert 0 < float(error) < 0.02, "the chain carries its error, so it does not pile up"
    assert distance(fleet) < distance(exact) + 0.03


@pytest.mark.parametrize("codec", CODECS)
def test_a_run_with_any_codec_is_deterministic(codec: str) -> None:
    def digests() -> list[str]:
        fleet = fleet_of(2, codec, error_feedback=True)
        for _ in range(20):
            fleet.advance()
        return [f.digest for f in fleet.protocol.fragments]

    assert digests() == digests()


# ---- a learner that missed versions


def missed(count: int, codec: str, ring: int) -> tuple[Hand, Offer]:
    """a makes versions of the one fragment; b receives none of them until the last reply."""
    hand = Hand(
        fragments=1, sync_interval=2, codec_down=codec, codec_block=BLOCK, ring_versions=ring, round_deadline_s=5.0
    )
    hand.join("a")
    hand.join("b")
    moves = torch.Generator().manual_seed(3)
    for _ in range(count):
        with hand.replicas["a"].writing(10):
            for tensor in hand.parameters["a"].values():
                tensor += torch.randn(tensor.shape, generator=moves)
        hand.step("a", 1)
        hand.poll("b")
        hand.answer("a", 0)
        hand.now += 5.0
        hand.poll("b")
        hand.publish()
        hand.adopt("a")
    return hand, hand.poll("b").offers[0]


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_the_missing_changes_or_all_of_it_whichever_is_smaller(codec: str, count: int, ring: int) -> None:
    hand, offer = missed(count, codec, ring)
    changes = count * get_codec(codec, BLOCK).nbytes(NUMEL)
    assert offer.version == count
    if count <= ring and changes < FULL:
        assert (offer.base_version, offer.codec, offer.payload.size) == (0, codec, changes)
    else:
        assert (offer.base_version, offer.codec, offer.payload.size) == (None, "fp32", FULL)
    hand.adopt("b")
    held, fragment = hand.replicas["b"].fragments[0], hand.protocol.fragments[0]
    assert held.version == count
    assert torch.equal(held.base, fragment.theta_hat)
    assert digest(held.base) == fragment.digest
    assert not torch.equal(fragment.theta, fragment.theta_hat)


def test_changes_as_long_as_all_of_it_are_not_sent() -> None:
    hand, _ = missed(2, "bf16", 4)
    assert 2 * get_codec("bf16").nbytes(NUMEL) == FULL
    assert hand.poll("b").offers[0].base_version is None


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("at", [0, -1])
def test_a_damaged_change_is_noticed_and_the_full_fragment_pulled(codec: str, at: int) -> None:
    hand, offer = missed(2, codec, 4)
    damaged = offer.payload.copy()
    damaged[at] ^= 0x01
    assert not hand.replicas["b"].receive(replace(offer, payload=damaged))
    assert hand.replicas["b"].report(1.0, 0.0, False).need_full == (0,)
    again = hand.poll("b").offers[0]
    assert (again.base_version, again.payload.size) == (None, FULL)
    hand.adopt("b")
    assert digest(hand.replicas["b"].fragments[0].base) == hand.protocol.fragments[0].digest
    assert hand.replicas["b"].report(1.0, 0.0, False).need_full == ()


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_a_change_in_blocks_of_another_size_is_refused(codec: str) -> None:
    hand, offer = missed(1, codec, 4)
    replica = hand.replicas["b"]
    replica._settings = replace(hand.settings, codec_block=32)
    assert not replica.receive(offer)
    assert replica.report(1.0, 0.0, False).need_full == (0,)


# ---- garbage on the way up


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("adopt", ["overwrite", "mix", "rebase"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_learner_with_nan_lives_is_refused_and_heals(codec: str, adopt: str, bad: float) -> None:
    dials = {"codec_up": codec, "codec_down": codec, "codec_block": BLOCK, "adopt": adopt}
    hand = opened(**dials, error_feedback=adopt != "rebase")
    for tensor in hand.parameters["a"].values():
        tensor.view(-1)[-1] = bad
    hand.answer("a", 1)
    assert hand.refused() == ["corrupt"]
    hand.answer("b", 1)
    hand.publish()
    theta = hand.protocol.fragments[1].theta
    assert bool(torch.isfinite(theta).all())
    hand.adopt("a")
    feedback = hand.replicas["a"].fragments[1].feedback
    assert feedback is None or feedback.error is None
    mine = {piece.name for piece in tiny_layout(2).fragments[1].pieces} - {"emb"}
    assert mine
    assert all(bool(torch.isfinite(hand.parameters["a"][name]).all()) for name in mine)
    held = hand.replicas["a"].fragments[1]
    assert (held.outstanding, held.discarded) == (0, {"missed": 20})
    hand.step("a")
    hand.poll("a")
    assert hand.protocol.books.balance().exact


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_a_contribution_of_the_wrong_length_or_with_an_infinite_scale_is_garbage(codec: str) -> None:
    hand = opened(codec_up=codec, codec_block=BLOCK)
    given = hand.capture("a", 1)
    numel = hand.protocol.layout.fragments[1].numel
    mine = get_codec(codec, BLOCK)
    assert decode_contribution(given, numel, mine) is not None
    infinite = given.payload.copy()
    infinite[:2] = np.frombuffer(np.uint16(0x7F80).tobytes(), np.uint8)
    for payload in (given.payload[:-1], np.append(given.payload, np.uint8(0)), infinite):
        sealed = replace(given, payload=payload, digest=payload_digest(payload))
        assert decode_contribution(sealed, numel, mine) is None
    assert decode_contribution(replace(given, payload=given.payload ^ np.uint8(1)), numel, mine) is None
    assert decode_contribution(replace(given, codec="fp32"), numel, mine) is None
