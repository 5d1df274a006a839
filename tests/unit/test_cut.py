"""Consistent cuts, taken in the middle of a bad network's mischief, and whole runs that go on from one."""

import copy
import json
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

from app.diloco.durable import Durable, whole_state
from app.diloco.events import CutBegun, CutDone, CutGivenUp, Decision, Mark
from app.diloco.messages import Consumed, CutId, Reply, Welcome
from app.diloco.replica import Replica
from app.diloco.replica_state import ReplicaState, restored, state_of
from app.diloco.settings import ADOPTIONS, DilocoSettings
from tests.unit.network import Process, World
from tests.unit.rest import run_out
from tests.unit.samples import Sample, Samples
from tests.unit.test_network import TICKS, random_settings
from tests.unit.tiny import through_json

DEADLINE = 60


@dataclass
class Part:
    """What a learner has saved."""

    token: str
    idle: bool
    state: ReplicaState


@dataclass
class Whole:
    """A cut."""

    state: Durable
    samples: Samples
    merged: dict
    """What versions up to it hold of each learner's work, for the check that nothing is merged twice."""
    parts: dict[str, Part] = field(default_factory=dict)
    learners: dict[str, int] | None = None


class CutWorld(World):
    """A world in which cuts are made."""

    def __init__(self, seed: int, learners: int, settings: DilocoSettings, *, faults: bool, deaths: bool) -> None:
        self.cuts: dict[CutId, Whole] = {}
        self.bags_then: dict[tuple[CutId, str, int], tuple[list[Sample], list[Sample], int]] = {}
        self.held_back: list[tuple[Consumed, ...]] = []
        self.given_up = 0
        super().__init__(seed, learners, settings, faults=faults, deaths=deaths)

    def cut(self) -> None:
        self.feed(Mark(len(self.cuts) + 1, DEADLINE))

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case CutBegun(id):
                state = through_json(whole_state(self.protocol))
                self.cuts[id] = Whole(state, self.samples, copy.deepcopy(self.merged))
                self.used_then = dict(self.samples.used)
            case CutDone(id, learners):
                samples = copy.deepcopy(self.samples)
                samples.used = self.used_then
                whole = self.cuts[id]
                whole.samples, whole.learners = samples, learners
                for name in whole.parts.keys() - learners.keys():
                    del whole.parts[name]
                for (name, incarnation), bag in samples.bags.items():
                    unknown = whole.state.meta["incarnations"].get(name, 0) < incarnation  # it joined later
                    then = ([], [], 0) if unknown else (bag.taken, bag.ahead, bag.request)
                    bag.taken, bag.ahead, bag.request = self.bags_then.get((id, name, incarnation), then)
                self._let_go()
            case CutGivenUp():
                self.given_up += 1
                self._let_go()

    def _let_go(self) -> None:
        for consumed in self.held_back:
            super()._on_consumed(consumed)
        self.held_back = []

    def _on_consumed(self, consumed: tuple[Consumed, ...]) -> None:
        if self.protocol.cut is not None:
            self.held_back.append(consumed)
        else:
            super()._on_consumed(consumed)

    def _on_reply(self, sent: tuple[str, int, Reply]) -> None:
        name, incarnation, reply = sent
        process = self.processes[name]
        replica = process.replica
        heard = replica is not None and replica.sender.incarnation == incarnation and process.frozen_until <= self.now
        if heard and reply.cut is not None and reply.cut > (replica.cut_taken or (0, 0)):
            replica.cut_taken = reply.cut
            state = state_of(replica)
            meta = json.loads(json.dumps(state.meta))
            whole = self.cuts[reply.cut]
            whole.parts[name] = Part(process.token, process.idle, ReplicaState(meta, state.tensors))
            bag = self.samples.bags.get((name, incarnation))
            if bag is not None:
                self.bags_then[reply.cut, name, incarnation] = (list(bag.taken), list(bag.ahead), bag.request)
            replica.cut_saved = reply.cut
        super()._on_reply(sent)

    def crash(self) -> None:
        super().crash()
        self._let_go()


class RestoredWorld(CutWorld):
    """What goes on from a cut: its syncer under a new epoch, its learners as they were, the others anew."""

    def __init__(self, world: CutWorld, id: CutId, seed: int) -> None:
        self.whole = world.cuts[id]
        super().__init__(seed, 0, world.settings, faults=True, deaths=True)
        self.state, self.journal, self.epoch = self.whole.state, [], world.epoch + 1
        self.protocol = self._restored()
        self.versions = [fragment.version for fragment in self.protocol.fragments]
        self.samples = copy.deepcopy(self.whole.samples)
        self.merged = copy.deepcopy(self.whole.merged)
        self.ids = world.ids
        for name in world.processes:
            self.start(name)
            if (part := self.whole.parts.get(name)) is not None:
                self.processes[name].token, self.processes[name].idle = part.token, part.idle

    def begin(self, process: Process, welcome: Welcome) -> Replica:
        part = self.whole.parts.get(process.name)
        if part is None or part.token != process.token:
            return super().begin(process, welcome)
        assert welcome.seq <= part.state.meta["seq"]
        state = ReplicaState(part.state.meta, {name: tensor.clone() for name, tensor in part.state.tensors.items()})
        replica = restored(self.layout, self.settings, process.parameters, welcome, state)
        assert replica.sender.incarnation == self.whole.learners[process.name]
        return replica


def cut_in(world: CutWorld) -> CutId:
    """Make one while everything goes on."""
    for _ in range(4 * DEADLINE):
        if world.protocol.cut is None:
            world.cut()
        world.tick()
        if done := [id for id, whole in world.cuts.items() if whole.learners]:
            return done[0]
    raise AssertionError("no cut was made")


@pytest.mark.parametrize(("batch", "adopt"), [*product(range(3), ADOPTIONS[:-1])])
def test_a_run_goes_on_from_a_cut_and_every_token_has_one_fate(adopt: str, batch: int) -> None:
    saved = 0
    for seed in range(4 * batch, 4 * batch + 4):
        world = CutWorld(seed, 3, random_settings(seed, adopt, "merge"), faults=True, deaths=seed % 2 > 0)
        for _ in range(TICKS // 2):
            world.tick()
        id = cut_in(world)
        for _ in range(TICKS // 4):
            world.tick()  # all of which is forgotten
        again = RestoredWorld(world, id, seed + 1000)
        saved += len(world.cuts[id].parts)
        for _ in range(TICKS // 2):
            again.tick()
        run_out(again)
    assert saved > 6


def test_a_cut_changes_nothing() -> None:
    """A quiet run that goes on from a cut ends with the bits of one that was never stopped."""
    settings = DilocoSettings(fragments=2, sync_interval=4, adopt="rebase", codec_up="int4", codec_down="int4")
    world = CutWorld(1, 2, settings, faults=False, deaths=False)
    for process in world.processes.values():
        process.speed = 1.0
    for _ in range(40):
        world.tick()
    id = cut_in(world)
    whole = world.cuts[id]
    assert set(whole.learners) == set(world.processes)
    for name, process in world.processes.items():
        parameters = {n: torch.zeros_like(p) for n, p in process.parameters.items()}
        part = whole.parts[name].state
        welcome = Welcome(process.replica.sender, 0, _offers(whole, world), 0)
        replica = restored(world.layout, settings, parameters, welcome, part)
        again = state_of(replica)
        assert part.meta == json.loads(json.dumps(again.meta))
        assert part.tensors.keys() == again.tensors.keys()
        assert all(again.tensors[name].equal(tensor) for name, tensor in part.tensors.items())


def _offers(whole: Whole, world: CutWorld):
    from tests.unit.tiny import restored as machine

    protocol = machine(world.settings, whole.state, [], world.epoch, 10**9)
    return tuple(f.offer_for("nobody", f.version, protocol.epoch, full=True) for f in protocol.fragments)


def test_without_learners_there_is_no_cut() -> None:
    world = CutWorld(3, 0, DilocoSettings(fragments=2), faults=False, deaths=False)
    world.cut()
    assert world.given_up == 1
    assert world.protocol.cut is None


def test_a_cut_that_somebody_does_not_save_is_given_up() -> None:
    world = CutWorld(2, 2, DilocoSettings(fragments=2, sync_interval=4), faults=False, deaths=False)
    for _ in range(10):
        world.tick()
    world.processes["learner-0"].frozen_until = 10**9
    world.cut()
    world.cut()  # one at a time
    assert len(world.cuts) == 1
    for _ in range(DEADLINE + 1):
        world.tick()
    assert world.given_up == 1
    assert world.protocol.cut is None
    assert all(whole.learners is None for whole in world.cuts.values())
