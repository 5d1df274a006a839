"""The learner's side: what it gives, what it adopts, and the fate of its work."""

import threading
from dataclasses import replace

import pytest
import torch

from app.diloco.codec import get_codec
from app.diloco.messages import Ask, Sender, Welcome
from app.diloco.replica import Replica
from app.diloco.settings import DilocoSettings
from tests.unit.lone import NUMEL, adopt, books, capture, full, level, replica_of, steps, value
from tests.unit.tiny import RUN, tiny_layout, tiny_parameters


def test_a_fresh_learner_starts_from_the_welcome() -> None:
    replica = replica_of("overwrite")
    assert level(replica) == 0.0
    assert (replica.clock, replica.steps, replica.tokens) == (7, 0, 0)


def test_a_damaged_welcome_is_refused() -> None:
    damaged = replace(full(0, 0.0), digest="0" * 32)
    with pytest.raises(ValueError, match="damaged"):
        Replica(tiny_layout(1), DilocoSettings(), tiny_parameters(5), Welcome(Sender(RUN, 1, "a", 1), 0, (damaged,), 0))


def test_a_contribution_is_the_difference_from_its_base() -> None:
    replica = replica_of("overwrite")
    steps(replica, 2)
    adopt(replica, full(1, 10.0))
    steps(replica, 3)
    given = replica.contribute(Ask(0, 4, 1, 1), 1.0, 0.0, False)
    assert torch.equal(get_codec("fp32").decode(given.payload, NUMEL), value(3.0))
    assert (given.base_version, given.c_steps, given.c_tokens, given.report.tokens) == (1, 3, 30, 50)


def test_overwrite_discards_what_came_after_the_capture() -> None:
    replica = replica_of("overwrite")
    steps(replica, 3)
    capture(replica, 1, 0)
    steps(replica, 2)
    adopt(replica, full(1, 10.0, (1, 1), clock=40))
    assert level(replica) == 10.0
    assert books(replica) == (0, 0, {"overwritten": 20}, 0)
    assert replica.clock == 40  # lifted


def test_overwrite_discards_all_of_it_when_the_offer_does_not_contain_it() -> None:
    replica = replica_of("overwrite")
    steps(replica, 3)
    capture(replica, 1, 0)
    steps(replica, 2)
    adopt(replica, full(1, 10.0, clock=3))
    assert books(replica) == (0, 0, {"missed": 50}, 0)
    assert replica.clock == 12  # its own is later


def test_rebase_keeps_what_the_offer_does_not_contain() -> None:
    replica = replica_of("rebase")
    steps(replica, 3)
    capture(replica, 1, 0)
    steps(replica, 2)
    adopt(replica, full(1, 10.0, (1, 1)))
    assert level(replica) == 12.0
    assert books(replica) == (20, 2, {}, 20)
    adopt(replica, full(2, 20.0))
    assert level(replica) == 22.0
    assert books(replica) == (20, 2, {}, 20)


def test_rebase_keeps_the_error_of_the_codec_too() -> None:
    replica = replica_of("rebase", codec_up="bf16")
    steps(replica, 1, change=1.0 + 2**-12)
    capture(replica, 1, 0)
    adopt(replica, full(1, 10.0, (1, 1)))
    assert level(replica) == pytest.approx(10.0 + 2**-12, abs=2e-6)


def test_mix_keeps_its_share() -> None:
    replica = replica_of("mix", mix_alpha=0.25)
    steps(replica, 3)
    capture(replica, 1, 0)
    steps(replica, 2)
    adopt(replica, full(1, 10.0, (1, 1)))
    assert level(replica) == 0.25 * 5.0 + 0.75 * 10.0
    assert books(replica) == (5, 1, {"overwritten": 15}, 5)


@pytest.mark.parametrize("kind", ["overwrite", "mix"])
def test_a_capture_whose_round_is_open_flies_on(kind: str) -> None:
    """Captured on base 0 for the round after version 1; version 1 (without it) is adopted before that round closes."""
    for mine, fate in (((1, 2),), {}), ((), {"missed": 30}):
        replica = replica_of(kind, mix_alpha=0.0)
        steps(replica, 3)
        capture(replica, 2, 1)
        steps(replica, 1)
        adopt(replica, full(1, 10.0))
        assert books(replica) == (0, 0, {"overwritten": 10}, 30)
        adopt(replica, full(2, 20.0, *mine))
        total = {"overwritten": 10} | fate
        assert books(replica) == (0, 0, total, 0)


def test_of_several_captures_in_flight_the_contained_one_is_merged_and_the_rest_discarded() -> None:
    replica = replica_of("overwrite")
    steps(replica, 3)
    capture(replica, 2, 1)
    steps(replica, 2)
    capture(replica, 3, 2)  # an offer got lost: the learner is asked again before it adopted version 1
    adopt(replica, full(1, 10.0))
    assert books(replica) == (0, 0, {}, 50)
    adopt(replica, full(2, 20.0, (1, 2)))
    assert books(replica) == (0, 0, {"overwritten": 20}, 0)


def test_a_capture_for_a_round_that_was_given_up_is_forgotten() -> None:
    replica = replica_of("rebase")
    for round_ in range(1, 50):
        steps(replica, 1)
        capture(replica, round_, 0)
    assert [c.round for c in replica.fragments[0].captures] == [49]
    adopt(replica, full(1, 10.0, (1, 49)))
    assert books(replica) == (0, 0, {}, 0)
    assert level(replica) == 10.0


def test_a_capture_for_a_newer_syncer_outlives_an_offer_of_the_older_one() -> None:
    replica = replica_of("overwrite")
    steps(replica, 3)
    assert replica.receive(full(1, 10.0))
    capture(replica, 1, 1, epoch=2)  # the syncer restarted, and asks before version 1 is adopted
    replica.adopt()
    assert books(replica) == (0, 0, {}, 30)
    adopt(replica, full(2, 20.0, (2, 1), epoch=2))
    assert books(replica) == (0, 0, {}, 0)


def test_a_capture_that_only_the_older_syncer_knew_is_missed() -> None:
    replica = replica_of("overwrite")
    steps(replica, 3)
    capture(replica, 1, 1)
    adopt(replica, full(1, 10.0))
    replica.hear(2, ())
    adopt(replica, full(2, 20.0, epoch=2))
    assert books(replica) == (0, 0, {"missed": 30}, 0)


def test_a_skipped_step_moves_only_the_clock() -> None:
    replica = replica_of("overwrite")
    replica.skip_step()
    assert (replica.clock, replica.steps, replica.tokens, books(replica)) == (8, 0, 0, (0, 0, {}, 0))


def test_a_step_that_fails_counts_nothing() -> None:
    replica = replica_of("overwrite")
    with pytest.raises(RuntimeError), replica.writing(10):
        raise RuntimeError
    assert (replica.steps, replica.tokens, replica.clock) == (0, 0, 7)


def test_threads_that_step_adopt_capture_and_receive_lose_nothing() -> None:
    replica = replica_of("rebase")
    done = threading.Event()

    def train() -> None:
        for _ in range(3000):
            steps(replica, 1)
            replica.adopt()
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    version, merged = 0, 0
    total = 0.0
    while not done.is_set():
        ask = replica.hear(1, (Ask(0, version + 1, 1, version),))[0]
        given = replica.contribute(ask, 1.0, 0.0, False)
        total += float(get_codec("fp32").decode(given.payload, NUMEL)[0])
        merged += given.c_tokens
        version += 1
        assert replica.receive(full(version, total, (1, version)))
        while replica.fragments[0].version < version and not done.is_set():
            replica.report(1.0, 0.0, False)
    thread.join()
    replica.adopt()
    assert replica.tokens == merged + replica.fragments[0].outstanding == 30_000
    assert level(replica) == 3000.0
