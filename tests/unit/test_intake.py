"""What a round takes and what it refuses."""

import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from app.diloco.codec import payload_digest
from app.diloco.events import (
    Published,
    Reported,
)
from app.diloco.fragments import gather
from app.diloco.messages import Contribution, Payload
from app.diloco.settings import CODECS
from tests.unit.tiny import Hand, opened


def test_a_contribution_counts_once() -> None:
    hand = opened()
    given = hand.answer("a", 1)
    hand.arrive(given)
    assert hand.refused() == ["duplicate"]
    hand.answer("b", 1)
    hand.publish()
    hand.arrive(given)
    assert hand.refused() == ["duplicate", "late"]
    assert [e["learner"] for e in hand.notes("merge")[0]["contains"]] == ["a", "b"]
    assert hand.protocol.books.balance().merged == 40 * hand.protocol.layout.fragments[1].numel


def test_an_ask_that_comes_twice_is_answered_once() -> None:
    hand = opened()
    report = hand.replicas["a"].report(1.0, 0.5, False)
    reply = hand.protocol.reply(report, hand.now)[0]
    assert len(hand.replicas["a"].hear(reply.epoch, reply.asks)) == 1
    assert hand.replicas["a"].hear(reply.epoch, reply.asks) == ()


def test_the_offer_lists_what_it_contains() -> None:
    hand = opened()
    given = hand.answer("a", 1)
    hand.answer("b", 1)
    hand.publish()
    entry = hand.poll("a").offers[0].contains
    assert [(e.learner, e.incarnation, e.round, e.version, e.c_tokens) for e in entry] == [("a", 1, given.round, 1, 20)]
    assert hand.poll("b").offers[0].contains[0].learner == "b"
    assert hand.protocol.fragments[1].offer_for("a", 1, 1, full=True).contains == ()  # it knows that by then


def one_fragment(**dials: object) -> Hand:
    """Learners a and b with one fragment, due at every second step; its first round is open."""
    hand = Hand(fragments=1, sync_interval=2, round_deadline_s=5.0, **dials)
    for name in ("a", "b"):
        hand.join(name)
    for name in ("a", "b"):
        hand.step(name, 2)
        hand.poll(name)
    return hand


def test_a_merged_learner_on_its_old_base_is_refused_and_gets_the_newest() -> None:
    hand = one_fragment(adopt="overwrite")
    for name in ("a", "b"):
        hand.answer(name, 0)
    hand.publish()
    hand.step("a", 2)
    given = hand.capture("a", 0)  # it received version 1 but has not adopted it
    assert given.base_version == 0
    hand.arrive(given)
    assert hand.refused() == ["already_merged"]
    assert hand.protocol.rounds[0].waiting == {"b"}
    hand.adopt("a")
    assert hand.replicas["a"].fragments[0].version == 1
    assert hand.replicas["a"].fragments[0].discarded == {"overwritten": 20}


def behind(late: str, ring: int = 4, merges: int = 1) -> tuple[Hand, Contribution]:
    """b holds version 0 with work that no version contains; a made `merges` versions without it."""
    hand = one_fragment(adopt="overwrite", late=late, ring_versions=ring)
    for _ in range(merges):
        hand.answer("a", 0)
        hand.now += 5.0
        hand.poll("b")
        hand.publish()
        hand.adopt("a")
        hand.step("a", 2)
        hand.poll("a")
    return hand, hand.capture("b", 0)


def test_work_on_an_old_base_that_no_version_contains_is_merged() -> None:
    hand, given = behind("merge")
    assert given.base_version == 0
    theta = hand.protocol.fragments[0].theta
    hand.arrive(given)
    mine = hand.answer("a", 0)
    hand.publish()
    assert hand.refused() == []
    contains = hand.notes("merge")[-1]["contains"]
    assert [(e["learner"], e["c_tokens"]) for e in contains] == [("a", mine.c_tokens), ("b", given.c_tokens)]
    # Both moved by 0.125 a step since their own bases; the merge moves Θ on, it undoes nothing.
    assert bool((hand.protocol.fragments[0].theta > theta).all())


def exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.float64)


def rda_of(vs: list[np.ndarray], ws: list[float]) -> np.ndarray:
    """(Σ w‖v‖ / Σ w) · φ(Σ w φ(v) / Σ w), or the weighted mean where the directions cancel."""
    shares = np.array(ws) / sum(ws)
    norms = np.array([np.linalg.norm(v) for v in vs])
    direction = sum(s * v / n for s, v, n in zip(shares, vs, norms, strict=True))
    if np.linalg.norm(direction) < 0.02:
        return sum(s * v for s, v in zip(shares, vs, strict=True))
    return shares @ norms * direction / np.linalg.norm(direction)


@pytest.mark.parametrize("learners", [1, 2, 5])
@pytest.mark.parametrize("old", ["none", "first", "all but the last"])
def test_each_outer_gradient_starts_from_the_base_of_its_own_learner(learners: int, old: str) -> None:
    """Against float64: v_m = Θ̂_base − θ_m, whatever the others' base; then merge and Nesterov step.

    The learners that are behind hold version 0, while version 1, far from it, was made of the others' work.
    """
    absent = {"none": 0, "first": min(1, learners - 1), "all but the last": learners - 1}[old]
    eta, mu = 0.7, 0.6
    dials = {"outer_lr": eta, "outer_momentum": mu, "guard_z": 0.0, "adopt": "overwrite", "late": "merge"}
    hand = Hand(fragments=1, sync_interval=2, round_deadline_s=5.0, **dials)
    names = [f"learner-{m}" for m in range(learners)]
    generators = {name: torch.Generator().manual_seed(m) for m, name in enumerate(names)}

    def step(name: str, steps: int, tokens: int, size: float) -> None:
        for _ in range(steps):
            with hand.replicas[name].writing(tokens):
                for tensor in hand.parameters[name].values():
                    tensor += size * torch.randn(tensor.shape, generator=generators[name])

    for name in names:
        hand.join(name)
    for m, name in enumerate(names):
        step(name, 2, 10 * (m + 1), 5.0)
        hand.poll(name)
    for name in names[absent:]:
        hand.answer(name, 0)
    if absent:
        hand.now += 5.0  # the round's deadline
        hand.poll(names[0])
    hand.publish()
    assert hand.protocol.fragments[0].version == 1
    for name in names[absent:]:
        hand.adopt(name)
    for m, name in enumerate(names):
        step(name, 2 + m % 2, 10 * (m + 1), 0.5)
        hand.poll(name)
    fragment = hand.protocol.fragments[0]
    theta, momentum = exact(fragment.theta), exact(fragment.momentum)
    layout = hand.protocol.layout.fragments[0]
    weights, vs = [], []
    for name in names:
        given = hand.capture(name, 0)
        assert given.base_version == (0 if name in names[:absent] else 1)
        base = exact(hand.replicas[name].fragments[0].base)
        vs.append(base - exact(gather(layout, hand.parameters[name])))
        weights.append(given.c_tokens * given.c_tokens / given.c_steps)
        hand.arrive(given)
    hand.publish()
    assert hand.refused() == []
    assert fragment.version == 2
    v, at = np.empty(layout.numel), 0
    for piece in layout.pieces:
        parts = [each[at : at + piece.numel] for each in vs]
        mean = sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)
        v[at : at + piece.numel] = mean if piece.name == "emb" else rda_of(parts, weights)
        at += piece.numel
    momentum = mu * momentum + v
    want = theta - eta * (v + mu * momentum)
    assert np.linalg.norm(exact(fragment.theta) - want) <= 1e-5 * np.linalg.norm(want - theta)
    assert np.linalg.norm(exact(fragment.momentum) - momentum) <= 1e-5 * np.linalg.norm(momentum)


def test_work_on_an_old_base_is_late_where_the_rule_is_to_discard() -> None:
    hand, given = behind("discard")
    hand.arrive(given)
    assert hand.refused() == ["late"]
    hand.adopt("b")
    assert hand.replicas["b"].fragments[0].discarded == {}  # the round it was captured for is open: not known yet
    hand.answer("a", 0)
    hand.publish()
    hand.adopt("b")
    assert hand.replicas["b"].fragments[0].discarded == {"missed": given.c_tokens}


def test_a_base_that_left_the_ring_is_stale() -> None:
    hand, given = behind("merge", ring=2, merges=2)
    assert given.base_version == 0
    hand.arrive(given)
    assert hand.refused() == ["stale_base"]
    hand.adopt("b")
    assert hand.replicas["b"].fragments[0].version == 2


@pytest.mark.parametrize("late", ["merge", "discard"])
def test_a_base_that_its_learner_never_received_is_garbage(late: str) -> None:
    """That version exists, and merged on it the work would carry the difference of both along."""
    hand = one_fragment(adopt="overwrite", late=late)
    hand.answer("a", 0)
    hand.now += 5.0
    hand.poll("b")
    hand.publish()
    hand.adopt("a")
    hand.step("a", 2)
    hand.poll("a")
    reply = hand.poll("b")  # tells of version 1, which does not arrive
    ask = hand.replicas["b"].hear(reply.epoch, reply.asks)[0]
    given = hand.replicas["b"].contribute(ask, 1.0, 0.5, False)
    assert (given.base_version, given.report.held, hand.protocol.fragments[0].version) == (0, (0,), 1)
    hand.arrive(replace(given, base_version=1))
    assert hand.refused() == ["corrupt"]
    hand.answer("a", 0)
    hand.publish()
    assert [e["learner"] for e in hand.notes("merge")[-1]["contains"]] == ["a"]


def resealed(given: Contribution, payload: Payload) -> Contribution:
    return replace(given, payload=payload, digest=payload_digest(payload))


def corrupt(given: Contribution, how: str) -> Contribution:
    numel = given.payload.size // 4
    payloads = {
        "nan": np.full(numel, np.nan, np.float32),
        "inf": np.full(numel, -np.inf, np.float32),
        "overflow": np.full(numel, 1e30, np.float32),
        "size": np.zeros(numel - 1, np.float32),
    }
    if how in payloads:
        return resealed(given, payloads[how].view(np.uint8))
    changes = {
        "flipped": {"payload": given.payload ^ np.uint8(1)},
        "digest": {"digest": "0" * 64},
        "no digest": {"digest": ""},
        "codec": {"codec": "int1"},
        "steps": {"c_steps": 3},
        "negative": {"c_steps": -1},
        "tokens": {"c_tokens": given.c_tokens + 1},
        "future": {"base_version": 1},
        "past": {"base_version": -1},
        "report": {"report": replace(given.report, held=(0,))},
        "fate": {"report": replace(given.report, discarded=({}, {"missed": 999}))},
    }
    return replace(given, **changes[how])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [
        "flipped",
        "digest",
        "no digest",
        "nan",
        "inf",
        "overflow",
        "size",
        "codec",
        "steps",
        "negative",
        "tokens",
        "future",
        "past",
        "report",
        "fate",
    ],
)
def test_garbage_is_refused_and_harms_nothing(how: str) -> None:
    hand = opened()
    hand.arrive(corrupt(hand.capture("a", 1), how))
    assert hand.refused() == ["corrupt"]
    hand.answer("b", 1)  # nobody waits for a second answer of a
    hand.publish()
    assert [e["learner"] for e in hand.notes("merge")[0]["contains"]] == ["b"]
    assert bool(torch.isfinite(hand.protocol.fragments[1].theta).all())


@pytest.mark.parametrize(
    "garbage",
    [
        {"tokens": -5},
        {"steps": 1},
        {"held": (7, 0)},
        {"discarded": ({}, {}, {})},
        {"discarded": ({"missed": -1}, {})},
        {"discarded": ({"missed": 21}, {})},
        {"step_time": math.inf},
        {"clock": -1},
    ],
)
def test_a_garbage_report_is_refused(garbage: dict[str, object]) -> None:
    hand = opened()
    before = hand.protocol.books.balance()
    hand.feed(Reported(replace(hand.replicas["a"].report(1.0, 0.5, False), **garbage)))  # type: ignore[arg-type]
    assert hand.refused() == ["corrupt"]
    assert hand.protocol.books.balance() == before


def test_an_older_report_that_arrives_later_changes_nothing() -> None:
    hand = opened()
    old = hand.replicas["a"].report(1.0, 0.5, False)
    hand.step("a", 1)
    hand.poll("a")
    hand.feed(Reported(old))
    assert hand.protocol.books.tokens == 50
    assert hand.protocol.members["a"].clock == 3
    assert hand.refused() == []


def test_without_any_work_nothing_changes() -> None:
    hand = Hand(outer_momentum=0.5)
    hand.join("a")
    hand.step("a", 2)
    hand.poll("a")
    hand.answer("a", 1)
    hand.publish()
    hand.adopt("a")
    momentum = hand.protocol.fragments[1].momentum.clone()
    assert float(momentum.norm()) > 0
    for _ in range(4):
        hand.replicas["a"].skip_step()
    hand.poll("a")
    hand.answer("a", 1)
    assert hand.notes("round_given_up")[-1]["fragment"] == 1
    assert hand.protocol.fragments[1].version == 1
    assert torch.equal(hand.protocol.fragments[1].momentum, momentum)


def test_the_work_of_a_dead_incarnation_is_not_held_against_the_next() -> None:
    hand = opened()
    hand.answer("a", 1)
    hand.answer("b", 1)
    result = hand.jobs.pop().run()
    hand.join("a")  # a dies and joins again while its work is being published: it holds version 0
    hand.feed(Published(result))
    assert hand.protocol.fragments[1].contained.get("a") is None
    hand.step("a", 1)
    hand.poll("a")
    hand.step("b", 4)
    hand.poll("b")
    given = hand.capture("a", 1)
    assert given.base_version == 0
    hand.arrive(given)
    assert hand.refused() == []
    assert hand.protocol.books.balance().discarded == {"died": 20 * hand.protocol.layout.fragments[0].numel}


@pytest.mark.parametrize("codec", CODECS)
def test_a_round_keeps_no_payload(codec: str) -> None:
    """It is a view of shared memory; the answer's values are the syncer's own."""
    hand = opened(codec_up=codec, codec_block=16, min_quorum=2)
    given = hand.capture("a", 1)
    sent = weakref.ref(given.payload)
    hand.arrive(given)
    del given
    assert hand.protocol.rounds[1].answers["a"].delta.numel() == hand.protocol.layout.fragments[1].numel
    assert sent() is None
