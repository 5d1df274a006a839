"""Where the members of a data-parallel group meet: who is there, and when a group forms. Pure: times are passed in.

A group forms of all members. When it breaks, each comes again, and a new one forms under a new generation once the
last is there, be it the same process or its successor. An elastic one does not wait for the last: it forms of whoever
is there, and forms again when somebody else comes.
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

    def __init__(self, members: Sequence[str], patience_s: float, tag: str, settle_s: float | None = None):
        """`patience_s`: a guest that was not announced for so long has left. `tag` makes generations unique.

        `settle_s`: an elastic group forms when nobody else has come for so long; None: only of all.
        """
        self._members = tuple(members)
        self._patience_s, self._settle_s = patience_s, settle_s
        self._changed_at = 0.0
        """When somebody came who had not been waiting."""
        self._together: frozenset[str] = frozenset()
        """Members of the newest group, while it is not known to have broken."""
        self._heard_at = 0.0
        """When that group was heard of."""
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
        known = self._waiting.get(guest.name)
        if known is None or known[0].visit != guest.visit:
            self._changed_at = now
        if guest.name in self._together:  # it has left the group, or is its successor
            self._together = frozenset()
        self._waiting[guest.name] = (guest, now)
        self._waiting = {n: (g, at) for n, (g, at) in self._waiting.items() if now - at <= self._patience_s}
        if self._complete(now):
            self._form(now)
        return self._formed.get(guest.visit)

    def wanted(self, generation: str, now: float) -> bool:
        """A member of that group says that it is well. Returns whether it is to meet again: somebody waits."""
        if any(place.generation == generation for place in self._formed.values()):
            self._heard_at = now
        return self._settle_s is not None and bool(self._waiting)

    def _complete(self, now: float) -> bool:
        """Whether those who wait make a group."""
        if len(self._waiting) == len(self._members):
            return True
        if self._settle_s is None or (self._together and now - self._heard_at <= self._patience_s):
            return False  # those who are together are told to come, too
        return now - self._changed_at >= self._settle_s

    def _form(self, now: float) -> None:
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
        self._together, self._heard_at = frozenset(self._waiting), now
        self._waiting.clear()
