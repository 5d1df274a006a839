"""Which learners a run wants now: pools grow where there is room, and shrink. Pure: times are passed in, in seconds.

A pool starts with its first learners, wanted at once and whatever happens to them. Beyond those, once they have places,
it holds one standing request at a time up to its limit: a learner that has no place yet, and gets one when a node
appears. A request that waits for too long rests for a while. One that was placed and loses its node is given up, not
moved: the next request takes whatever there is. Where that happens again and again, the pool asks later and later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from app.config import ElasticConfig
from app.config.roster import extra_learner, pool_name_of


class Place(Enum):
    """Where a learner stands."""

    WAITING = "waiting"  # it has no place in the cluster
    PLACED = "placed"
    MOVING = "moving"  # it had one, and its node is gone


@dataclass(frozen=True)
class Add:
    """Ask for a place for this learner."""

    learner: str


@dataclass(frozen=True)
class Withdraw:
    """This learner has no place, and shall not wait for one."""

    learner: str


@dataclass(frozen=True)
class Send:
    """This learner has a place and has to go: let it hand in its work first."""

    learner: str
    reason: str


Wish = Add | Withdraw | Send


@dataclass
class _Pool:
    first: tuple[str, ...]
    most: int
    asked_at: float | None = None
    """When its standing request was made; None when it has none."""
    not_before: float = 0.0
    """It makes no request sooner."""
    losses: int = 0
    """Learners in a row that lost their nodes soon."""
    placed_at: dict[str, float] = field(default_factory=dict)
    """When each of its further learners got its place."""


class Growth:
    """Holds the wanted learners of every pool against those that are there."""

    def __init__(self, learners: Collection[str], most: Mapping[str, int], sizes: Mapping[str, int], c: ElasticConfig):
        """`learners`: the first ones of all pools; `sizes`: how many of them each pool has; `most`: its limit."""
        self._config, self._sizes = c, dict(sizes)
        self._pools = {
            name: _Pool(tuple(x for x in learners if pool_name_of(x, sizes) == name), most[name]) for name in sizes
        }

    @property
    def limits(self) -> dict[str, int]:
        """The most learners of each pool."""
        return {name: pool.most for name, pool in self._pools.items()}

    def check(self, pool: str, most: int) -> None:
        """Refuse what `scale` can't do. Raises ValueError, which says what is allowed."""
        if pool not in self._pools:
            raise ValueError(f"pool {pool}: the pools are {', '.join(self._pools)}")
        if most < 0:
            raise ValueError(f"{most} learners: 0 or more are allowed")

    def scale(self, pool: str, most: int) -> None:
        """Let a pool have so many learners at most. Raises ValueError."""
        self.check(pool, most)
        self._pools[pool].most = most
        self._pools[pool].not_before = 0.0

    def look(self, there: Mapping[str, Place], leaving: Collection[str], now: float) -> list[Wish]:
        """What is wanted now. `there`: every learner that was asked for; `leaving`: those that hand in."""
        wishes: list[Wish] = []
        for name, pool in self._pools.items():
            mine = {x: place for x, place in there.items() if pool_name_of(x, self._sizes) == name}
            wishes += self._see(name, pool, mine, leaving, now)
        return wishes

    def _see(
        self, name: str, pool: _Pool, mine: Mapping[str, Place], leaving: Collection[str], now: float
    ) -> list[Wish]:
        first = pool.first[: pool.most]
        wishes: list[Wish] = [Add(learner) for learner in first if learner not in mine]
        further = [x for x in mine if x not in first]
        further.sort(key=lambda x: (x in pool.first, mine[x] is not Place.PLACED, _number(x)))
        room = pool.most - len(first)
        wishes += self._mind(pool, further, mine, now)
        gone = {wish.learner for wish in wishes if isinstance(wish, Withdraw)}
        staying = [x for x in further if x not in leaving and x not in gone]
        for learner in staying[room:]:
            waiting = mine[learner] is Place.WAITING
            wishes.append(Withdraw(learner) if waiting else Send(learner, "the pool has shrunk"))
        waits = any(mine.get(x, Place.WAITING) is not Place.PLACED for x in (*first, *staying))
        if len(staying) < room and not waits and not gone and now >= pool.not_before:
            taken = {*mine}
            free = next(x for k in range(len(taken) + 1) if (x := extra_learner(name, k)) not in taken)
            wishes.append(Add(free))
            pool.asked_at = now
        return wishes

    def _mind(self, pool: _Pool, further: Collection[str], mine: Mapping[str, Place], now: float) -> list[Wish]:
        """Requests that wait for too long, and learners whose nodes are gone."""
        wishes: list[Wish] = []
        pool.placed_at = {x: at for x, at in pool.placed_at.items() if x in mine}
        for learner in further:
            match mine[learner]:
                case Place.PLACED:
                    if learner not in pool.placed_at:
                        pool.placed_at[learner], pool.asked_at = now, None
                    elif now - pool.placed_at[learner] >= self._config.steady_s:
                        pool.losses = 0
                case Place.MOVING:
                    self.lost(learner, now)
                    wishes.append(Withdraw(learner))
                case Place.WAITING:
                    pool.asked_at = now if pool.asked_at is None else pool.asked_at
                    if now - pool.asked_at >= self._config.request_s:
                        pool.asked_at, pool.not_before = None, now + self._config.rest_s
                        wishes.append(Withdraw(learner))
        return wishes

    def lost(self, learner: str, now: float) -> None:
        """A further learner's node is gone, or goes: soon after it got its place, it counts against its pool."""
        pool = self._pools[pool_name_of(learner, self._sizes) or ""]
        placed_at = pool.placed_at.pop(learner, None)
        if placed_at is None or now - placed_at >= self._config.steady_s:
            return
        wait = min(self._config.backoff_s * 2**pool.losses, self._config.backoff_most_s)
        pool.losses += 1
        pool.not_before = max(pool.not_before, now + wait)


def _number(learner: str) -> int:
    return int(learner.rpartition("-")[2])
