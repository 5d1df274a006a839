"""Bring a `World` to rest, and what must hold there."""

from app.diloco.codec import digest
from app.diloco.events import Finish
from tests.unit.network import World


def settle(world: World) -> None:
    """The faults stop, learners stop stepping, and all that is under way arrives."""
    world.faults = False
    for _ in range(200):
        for process in world.processes.values():
            process.frozen_until, process.speed = 0, 0.0
        world.tick()
        if not world.wires and not world.protocol.rounds and not world.queue and world.writing is None and even(world):
            return
    raise AssertionError("the run does not come to rest")


def even(world: World) -> bool:
    """Whether all learners have joined, adopted everything, and the syncer knows their counters."""
    versions = [fragment.version for fragment in world.protocol.fragments]
    for process in world.processes.values():
        if process.replica is None or [held.version for held in process.replica.fragments] != versions:
            return False
        account = world.protocol.books.account(process.name, process.replica.sender.incarnation)
        if account is None or account.seq != process.replica.seq:
            return False
    return True


def check_at_rest(world: World) -> None:
    """Learners and syncer agree on the value and on the fate of every token; nothing was merged twice."""
    for process in world.processes.values():
        replica = process.replica
        assert replica is not None
        account = world.protocol.books.account(process.name, replica.sender.incarnation)
        assert account is not None
        for p, held in enumerate(replica.fragments):
            assert digest(held.base) == world.protocol.fragments[p].digest
            gone = sum(held.discarded.values())
            assert replica.tokens == account.merged[p] + gone + held.outstanding
            assert account.outstanding(p) == held.outstanding
    if world.settings.adopt == "mix":
        return  # there the counters are shares, not stretches of work
    for stretches in world.merged.values():
        for (_, stop), (start, _) in zip(sorted(stretches), sorted(stretches)[1:], strict=False):
            assert stop <= start


def run_out(world: World) -> None:
    """Bring it to rest and to its end: every token has a fate by then, and every sample its place."""
    settle(world)
    check_at_rest(world)
    end(world)
    balance = world.protocol.books.balance()
    assert balance.exact
    assert balance.outstanding == 0
    world.samples.check()


def end(world: World) -> None:
    world.feed(Finish("budget", 20.0))
    for _ in range(100):
        if world.protocol.ended:
            world.snapshot()
            world.deliver()
            return
        world.tick()
    raise AssertionError("the run does not end")
