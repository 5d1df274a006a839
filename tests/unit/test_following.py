"""A standby's state: whatever it saw of the journal, it is to the bit what a start from the journal would have."""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.publishing import Publisher, follower_of
from actors.spec import RunSpec
from actors.standby import PairedSyncer
from actors.syncer import Syncer
from app.diloco.durable import whole_state
from app.diloco.protocol import Protocol
from app.run.following import Follower
from app.run.journal import JournalDamaged
from app.run.record import RecordDamaged
from tests.unit.test_kill_points import OnDisk, begin, in_child, warm
from tests.unit.tiny import RUN, tiny_layout


def spec_of(folder: Path) -> RunSpec:
    config = warm()
    return RunSpec(RUN, config, str(folder), tiny_layout(config.diloco.fragments), 1000)


def led_from(folder: Path, follower: Follower | None = None) -> Publisher:
    return Publisher(spec_of(folder), lambda _: None, lambda *_, **__: None, lambda _: None, follower)


def assert_same(one: Protocol, other: Protocol) -> None:
    a, b = whole_state(one), whole_state(other)
    assert a.meta == b.meta
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_it_goes_on_from_what_a_fresh_start_would_read(tmp_path: Path, every: int) -> None:
    """Looking after every few moves, with the journal compacted at every second merge, or for the first time now."""
    begin(tmp_path / "run")
    follower, moves = follower_of(spec_of(tmp_path / "run")), 0

    def look() -> None:
        nonlocal moves
        moves += 1
        if moves % every == 0:
            follower.follow()

    OnDisk(tmp_path / "run").moves(9, look)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    warmed, cold = led_from(tmp_path / "run", follower), led_from(tmp_path / "copy")
    assert warmed.protocol.merges >= 9
    assert warmed.protocol.epoch == cold.protocol.epoch
    assert_same(warmed.protocol, cold.protocol)


def test_it_tells_the_merges_that_the_tape_does_not_have(tmp_path: Path) -> None:
    begin(tmp_path)
    follower = follower_of(spec_of(tmp_path))
    follower.follow()
    hand = OnDisk(tmp_path)
    made: list[tuple[int, int, str]] = []
    hand.moves(3, lambda: made.extend((f.index, f.version, f.digest) for f in hand.protocol.fragments if f.version))
    told = [(merge["fragment"], merge["version"], merge["digest"]) for merge in led_from(tmp_path, follower).untold]
    assert told
    assert set(told) <= set(made)
    assert max(told) in made[-2:]


def test_a_publisher_that_was_replaced_leaves_before_anybody_hears_of_its_merge(tmp_path: Path) -> None:
    def body(replaced: Callable[[], object]) -> None:
        hand = OnDisk(tmp_path)
        hand.moves(1, lambda: None)
        replaced()
        (tmp_path / "seen").write_text(str(hand.protocol.merges))
        hand.saw = lambda *_: (tmp_path / "seen").write_text("more")
        hand.work(0.1, "a", "b")
        hand.adopt("a")

    begin(tmp_path)
    assert in_child(lambda: body(lambda: led_from(tmp_path))) == 1
    assert int((tmp_path / "seen").read_text()) > 0


def test_after_damage_it_starts_over_from_the_next_snapshot(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    follower = follower_of(spec_of(tmp_path / "run"))
    follower.follow()
    seen: list[str] = []

    def look() -> None:
        if not seen:
            join = sorted((tmp_path / "run" / "checkpoints" / "journal").glob("*.safetensors"))[1]
            join.write_bytes(b"torn")
        try:
            follower.follow()
            seen.append("well")
        except (RecordDamaged, JournalDamaged):
            seen.append("damaged")

    OnDisk(tmp_path / "run").moves(9, look)
    assert seen[0] == "damaged"
    assert seen[-1] == "well"
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert_same(led_from(tmp_path / "run", follower).protocol, led_from(tmp_path / "copy").protocol)


def test_whatever_a_syncer_is_asked_one_of_a_pair_answers_too() -> None:
    """Both have the same coroutines that take the same arguments, `confirm` aside, which its own shell asks."""

    def asked(actor: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(actor, inspect.iscoroutinefunction)
        return {name: list(inspect.signature(m).parameters) for name, m in methods if not name.startswith("_")}

    single, paired = asked(Syncer), asked(PairedSyncer)
    assert single.pop("confirm")
    assert paired.pop("standing") == ["self"]
    assert single == paired
