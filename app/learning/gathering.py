"""Where the members of a data-parallel group meet: who is there, and when a group forms. Pure: times are passed in.

A group forms of all members. When it breaks, each comes again, and a new one forms under a new generation once the
last is there, be it the same process or its successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Guest:
    """A member that waits for a group."""

    name: str
    incarnation: int
    visit: str
    """Unique for each time it comes: the same visit may be announced again and again."""
    host: str
    """Address of its node, as the others reach it."""
    port: int
    """Of the key-value store that it serves, through which a group of which it is rank 0 finds together."""
    steps: int
    """Optimizer steps that its weights have seen."""


@dataclass(frozen=True)
class Formation:
    """A group as one member has it."""

    generation: str
    """Unique: keys of an earlier group in the same store mean nothing to it."""
    rank: int
    world: int
    host: str
    port: int
    """Of rank 0's store."""
    source: int
    """Rank of the member whose weights have seen the most steps: all take over its state."""


class Gathering:
    """The members that wait, and the newest group."""

    def __init__(self, members: Sequence[str], patience_s: float, tag: str):
        """`patience_s`: a guest that was not announced for so long has left. `tag` makes generations unique."""
        self._members = tuple(members)
        self._patience_s = patience_s
        self._tag = tag
        self._count = 0
        self._waiting: dict[str, tuple[Guest, float]] = {}
        self._newest: dict[str, int] = {}  # member → newest incarnation seen
        self._formed: dict[str, Formation] = {}  # visit → its place in the newest group

    def arrive(self, guest: Guest, now: float) -> Formation | None:
        """Announce a guest, again while it waits. Returns its group once all are there.

        An older incarnation than the newest seen of its member waits for nothing: its place is taken.
        """
        if guest.visit in self._formed:
            return self._formed[guest.visit]
        if guest.name not in self._members or guest.incarnation < self._newest.get(guest.name, 0):
            return None
        self._newest[guest.name] = guest.incarnation
        self._waiting[guest.name] = (guest, now)
        self._waiting = {n: (g, at) for n, (g, at) in self._waiting.items() if now - at <= self._patience_s}
        if self._complete():
            self._form()
        return self._formed.get(guest.visit)

    def _complete(self) -> bool:
        """Whether those who wait make a group: all members."""
        return len(self._waiting) == len(self._members)

    def _form(self) -> None:
        self._count += 1
        guests = [self._waiting[name][0] for name in self._members if name in self._waiting]
        source = max(range(len(guests)), key=lambda rank: (guests[rank].steps, -rank))
        self._formed = {
            guest.visit: Formation(
                generation=f"{self._tag}-{self._count}",
                rank=rank,
                world=len(guests),
                host=guests[0].host,
                port=guests[0].port,
                source=source,
            )
            for rank, guest in enumerate(guests)
        }
        self._waiting.clear()
