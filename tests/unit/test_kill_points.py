"""SIGKILL at every point of publishing: no version that a learner has seen is lost, and what is there is as without it.

A real journal on a real disk, written by the syncer's own publisher in a process that kills itself just before one of
the system calls that make something durable, or half-way through offering.
"""

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.publishing import Publisher
from actors.spec import RunSpec
from app.config import Config, load
from app.diloco.codec import digest, get_codec
from app.diloco.durable import first_state
from app.diloco.events import Event, Grant, Join, Record
from app.diloco.job import MergeJob
from app.diloco.replica import Replica
from app.run.journal import Journal
from app.run.storage import LocalStore
from tests.unit.tiny import RUN, Hand, tiny_layout, tiny_parameters

MOVES = 5
CALLS = ("fsync", "link", "replace", "unlink")
DIALS = (
    "diloco.fragments=2",
    "diloco.sync_interval=4",
    "diloco.overlap_steps=1",
    "diloco.outer_lr=0.7",
    "diloco.outer_momentum=0.6",
    "diloco.average=0.7",
    "diloco.codec_down=int4",
    "checkpoint.snapshot_every_merges=2",
    "checkpoint.keep=1",
)
State = dict[tuple[int, int], tuple[str, str, str, str]]
"""(fragment, version) → digests of Θ, Θ̂, momentum and Θ̄."""


@cache
def warm() -> Config:
    """The configuration; and the kernels are compiled, for all forks to come."""
    config = load(list(DIALS))
    codec = get_codec(config.diloco.codec_down, config.diloco.codec_block)
    codec.decode(codec.encode(torch.ones(100)), 100)
    return config


class OnDisk(Hand):
    """A hand whose syncer is the real publisher, with its journal in a folder."""

    def __init__(self, folder: Path, saw: Callable[[str, int, int], None] = lambda *_: None):
        config = warm()
        spec = RunSpec(RUN, config, str(folder), tiny_layout(config.diloco.fragments), 1000)
        self.saw = saw
        self.loop = asyncio.new_event_loop()
        super().__init__()
        self.settings = config.diloco
        self.publisher = Publisher(spec, self._fed, lambda *_, **__: None, lambda _: None)
        self.protocol = self.publisher.protocol

    def _fed(self, event: Event) -> None:
        self.feed(event)

    def _until(self, work: Awaitable[None]) -> None:
        self.loop.run_until_complete(work)

    def join(self, name: str, token: str = "") -> Replica:
        token = token or f"{name}-{self.protocol.epoch}"
        for decision in self.feed(Join(self.hello(name, token))):
            if isinstance(decision, Record):
                self._until(self.publisher.record(decision))
        welcome = self.last(Grant).welcome
        self.parameters[name] = tiny_parameters(99)
        layout = tiny_layout(self.settings.fragments)
        self.replicas[name] = Replica(layout, self.settings, self.parameters[name], welcome)
        for offer in welcome.offers:
            self.saw(name, offer.fragment, offer.version)
        return self.replicas[name]

    def publish(self) -> None:
        while self.jobs:
            job: MergeJob = self.jobs.pop(0)
            self._until(self.publisher.merge(job))

    def adopt(self, name: str) -> None:
        super().adopt(name)
        for p, held in enumerate(self.replicas[name].fragments):
            self.saw(name, p, held.version)

    def moves(self, count: int, note: Callable[[], None]) -> None:
        """Merges of work that depends on the fragments' versions alone."""
        for name in ("a", "b"):
            self.join(name)
        for _ in range(count):
            self.now += 10.0  # nobody can step in no time
            self.work(0.1, "a", "b")
            note()
            for name in ("a", "b"):
                self.adopt(name)


def state(hand: Hand) -> State:
    return {
        (f.index, f.version): (digest(f.theta), digest(f.theta_hat), digest(f.momentum), digest(f.average))
        for f in hand.protocol.fragments
    }


def begin(folder: Path) -> None:
    layout = tiny_layout(2)
    first = first_state(RUN, layout, tiny_parameters(0))
    journal = Journal(LocalStore(folder / "checkpoints"), keep=1)
    journal.claim_epoch()
    journal.snapshot(first.meta, first.tensors)


def in_child(body: Callable[[], None]) -> int | None:
    warm()

    def run() -> None:
        torch.set_num_threads(1)
        body()
        os._exit(0)  # without the threads of the process it was forked from

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    return child.exitcode


def run_and_die(folder: Path, point: int) -> int | None:
    """A run in another process that ends at its `point`-th call; the last call's name is left in the folder."""

    def body() -> None:
        count, seen = 0, (folder / "seen").open("a")
        fsync = os.fsync

        def passing(what: str) -> None:
            nonlocal count
            if count == point:
                (folder / "died").write_text(what)
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                passing(f"{name} {args[-1] if name == 'replace' else args[0]}")
                return original(*args, **kwargs)

            return call

        def saw(name: str, fragment: int, version: int) -> None:
            passing(f"offer to {name}")
            seen.write(json.dumps([fragment, version]) + "\n")
            seen.flush()
            fsync(seen.fileno())

        for name in CALLS:
            setattr(os, name, counted(name, getattr(os, name)))
        OnDisk(folder, saw).moves(MOVES, lambda: None)

    return in_child(body)


def run_through(folder: Path) -> State:
    """Every state of a run that nobody kills."""

    def body() -> None:
        hand, states = OnDisk(folder), {}
        hand.moves(MOVES, lambda: states.update(state(hand)))
        (folder / "states").write_bytes(pickle.dumps(states | state(OnDisk(folder))))

    begin(folder)
    assert in_child(body) == 0
    found: State = pickle.loads((folder / "states").read_bytes())
    first = OnDisk(folder.parent / "first")
    return found | state(first)


def come_back(folder: Path) -> State:
    """The state that a new syncer finds; it goes on merging from there."""

    def body() -> None:
        hand = OnDisk(folder)
        (folder / "back").write_bytes(pickle.dumps(state(hand)))
        before = hand.protocol.merges
        hand.moves(2, lambda: None)
        assert hand.protocol.merges >= before + 2

    assert in_child(body) == 0
    back: State = pickle.loads((folder / "back").read_bytes())
    return back


@pytest.mark.timeout(400)
def test_a_kill_at_any_point_loses_nothing_that_was_seen(tmp_path: Path) -> None:
    begin(tmp_path / "first")
    states = run_through(tmp_path / "whole")
    died_at = set()
    for point in range(10_000):
        folder = tmp_path / str(point)
        begin(folder)
        code = run_and_die(folder, point)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        died_at.add((folder / "died").read_text().replace(str(folder / "checkpoints"), ""))
        back = come_back(folder)
        assert {key: states[key] for key in back} == back
        versions = dict(key for key in back)
        for line in (folder / "seen").read_text().splitlines():
            fragment, version = json.loads(line)
            assert versions[fragment] >= version
    assert point > 50
    points = " ".join(sorted(died_at))
    of_kinds = ("fsync", "link /journal/", "replace /snapshot-", "replace /latest.json", "unlink /journal/0")
    for what in (*of_kinds, "unlink /snapshot-", "offer to a", "offer to b"):
        assert what in points, points


def test_no_record_goes_before_the_tape_has_its_merge(tmp_path: Path) -> None:
    """Else a machine that is lost with the newest events takes with it all that tells of them."""
    begin(tmp_path)
    journal, kept = LocalStore(tmp_path / "checkpoints"), []

    def body() -> None:
        hand = OnDisk(tmp_path)
        hand.publisher._noted = lambda: False
        hand.moves(MOVES, lambda: kept.append(len(journal.names("journal/"))))
        assert kept == sorted(kept)
        assert journal.names("snapshot-") == ["snapshot-000000000001.safetensors"]
        OnDisk(tmp_path).moves(MOVES, lambda: None)
        assert len(journal.names("journal/")) < kept[-1]

    assert in_child(body) == 0
