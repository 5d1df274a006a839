"""What a codec leaves out of a contribution comes with the next one, once, and only if the first was merged."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.diloco.codec import digest, get_codec
from app.diloco.feedback import Feedback, feedback_for
from app.diloco.fragments import gather
from app.diloco.held import Capture
from app.diloco.messages import Ask, Contribution, Offer
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from tests.unit.lone import NUMEL, adopt, full, replica_of
from tests.unit.tiny import Hand, tiny_layout, tiny_parameters

LOW_BIT = ("bf16", "int8", "int4", "fp4")
BLOCK = DilocoSettings().codec_block


def error_of(replica: Replica) -> torch.Tensor:
    feedback = replica.fragments[0].feedback
    assert feedback is not None
    return torch.zeros(NUMEL) if feedback.error is None else feedback.error


def walk(replica: Replica, seed: int) -> None:
    """An inner step that moves every parameter differently."""
    moves = tiny_parameters(1000 + seed)
    with replica.writing(10):
        for name, tensor in replica._weights.tensors.items():
            tensor += moves[name]


def give(replica: Replica, round_: int, version: int) -> tuple[Contribution, Capture]:
    (ask,) = replica.hear(1, (Ask(0, round_, 1, version),))
    given = replica.contribute(ask, 1.0, 0.0, False)
    return given, replica.fragments[0].captures[-1]


def decoded(given: Contribution) -> torch.Tensor:
    return get_codec(given.codec, BLOCK).decode(given.payload, NUMEL)


# ---- which contributions count


def test_only_a_contained_contribution_leaves_an_error() -> None:
    replica = replica_of("overwrite", codec_up="int4", error_feedback=True)
    walk(replica, 1)
    give(replica, 1, 0)
    adopt(replica, full(1, 0.0))  # version 1 was made without it
    assert not error_of(replica).any()
    walk(replica, 2)
    _, capture = give(replica, 2, 1)
    assert capture.residue is not None
    adopt(replica, full(2, 0.0, (1, 2)))
    assert torch.equal(error_of(replica), capture.residue)
    assert error_of(replica).any()


def test_a_refused_contribution_leaves_the_error_as_it_was_and_the_next_one_carries_it() -> None:
    replica = replica_of("overwrite", codec_up="int4", error_feedback=True)
    walk(replica, 1)
    give(replica, 1, 0)
    adopt(replica, full(1, 0.0, (1, 1)))
    error = error_of(replica).clone()
    walk(replica, 2)
    give(replica, 2, 1)
    adopt(replica, full(2, 0.0))
    assert torch.equal(error_of(replica), error)
    given, capture = give(replica, 3, 2)  # nothing was done since: only the error is sent
    assert capture.residue is not None
    assert torch.equal(decoded(given) + capture.residue, error)


def test_a_contribution_that_lands_after_another_version_was_adopted_counts_too() -> None:
    replica = replica_of("overwrite", codec_up="int4", error_feedback=True)
    walk(replica, 1)
    _, capture = give(replica, 2, 1)
    adopt(replica, full(1, 0.0))
    assert not error_of(replica).any()
    adopt(replica, full(2, 0.0, (1, 2)))
    assert capture.residue is not None
    assert torch.equal(error_of(replica), capture.residue)


def test_of_two_contributions_with_the_same_error_one_is_merged() -> None:
    """The syncer's rule that makes it so: no contribution on a base older than a version that holds one."""
    hand = Hand(fragments=1, sync_interval=2, codec_up="int4", error_feedback=True)
    hand.join("a")
    for round_ in range(3):
        hand.step("a", 2)
        hand.poll("a")
        hand.answer("a", 0)
        hand.publish()
        if round_ == 0:  # version 2 holds a's work, and a does not adopt it
            hand.adopt("a")
    assert hand.refused() == ["already_merged"]
    assert hand.protocol.fragments[0].version == 2


# ---- how much is carried


@pytest.mark.parametrize("codec", LOW_BIT)
@pytest.mark.parametrize(("kind", "alpha"), [("overwrite", 0.5), ("mix", 0.25), ("mix", 0.75), ("rebase", 0.5)])
def test_nothing_that_one_learner_did_is_lost_or_sent_twice(codec: str, kind: str, alpha: float) -> None:
    """η = 1, μ = 0, M = 1: θ + e is the start plus all steps, at any time; and Θ̂ is near it."""
    replica = replica_of(kind, codec_up=codec, mix_alpha=alpha, error_feedback=True)
    theta, done = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for round_ in range(1, 30):
        walk(replica, round_)
        done += flat(tiny_parameters(1000 + round_))
        given, _ = give(replica, round_, round_ - 1)
        theta = theta + decoded(given)
        adopt(replica, offer_of(theta, round_))
        feedback = replica.fragments[0].feedback
        assert (feedback is None) == (kind == "rebase")
        carried = torch.zeros(NUMEL) if feedback is None or feedback.error is None else feedback.error
        torch.testing.assert_close(flat(replica._weights.tensors) + carried, done, atol=2e-5, rtol=0)
    # A mean of the errors of single rounds, whose vectors are about as long as √NUMEL: not their sum. What a mixing
    # learner keeps of its steps is not in Θ̂ yet.
    if kind != "mix":
        assert float((theta - done).norm()) < 0.5 * NUMEL**0.5


def flat(parameters: Any) -> torch.Tensor:
    return gather(tiny_layout(1).fragments[0], parameters)


def offer_of(theta: torch.Tensor, version: int) -> Offer:
    payload = get_codec("fp32").encode(theta)
    return replace(full(version, 0.0, (1, version)), payload=payload, digest=digest(theta))


@pytest.mark.parametrize("feedback", [False, True])
def test_small_changes_beside_a_large_one_arrive_with_feedback_alone(feedback: bool) -> None:
    """A step of 0.05 is under half a step of int4 where the block's largest element moves by 1."""
    replica = replica_of("overwrite", codec_up="int4", error_feedback=feedback)
    theta = torch.zeros(NUMEL)
    for round_ in range(1, 21):
        with replica.writing(10):
            for name, tensor in replica._weights.tensors.items():
                tensor += 0.05
                if name == "a":
                    tensor[0, 0] += 0.95
        given, _ = give(replica, round_, round_ - 1)
        theta = theta + decoded(given)
        adopt(replica, offer_of(theta, round_))
    small = theta.sort().values[:-1]
    if feedback:
        assert float((small - 1.0).abs().max()) < 0.1
    else:
        assert not small.any()


def test_the_carried_error_is_a_mean_that_never_grows() -> None:
    feedback = Feedback(kept=0.25)
    for _ in range(50):
        feedback.contained(torch.ones(3))
        assert feedback.error is not None
        assert float(feedback.error.max()) <= 1.0
    assert torch.equal(feedback.wanted(torch.zeros(3)), feedback.error)


@pytest.mark.parametrize(
    ("dials", "kept"),
    [
        ({"adopt": "overwrite"}, 0.0),
        ({"adopt": "mix", "mix_alpha": 0.3}, 0.3),
        ({"adopt": "rebase"}, None),
        ({"adopt": "overwrite", "codec_up": "fp32"}, None),
        ({"adopt": "overwrite", "error_feedback": False}, None),
    ],
)
def test_who_carries_an_error(dials: dict[str, Any], kept: float | None) -> None:
    feedback = feedback_for(DilocoSettings(**({"codec_up": "int4", "error_feedback": True} | dials)))
    assert (feedback.kept if feedback else None) == kept
