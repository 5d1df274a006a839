"""A syncer's state, kept up with the journal that another one writes, or read from it at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from app.diloco.durable import Durable
from app.diloco.shadow import Shadow
from app.run.journal import Journal, JournalDamaged
from app.run.record import Record, RecordDamaged
from app.run.tail import News, Tail

TOLD = ("fragment", "round", "version", "clock", "share", "contains")
"""What the tape needs of a merge that it does not have, its digest aside."""
CATCH_UP_TRIES = 3
"""A writer that was frozen while it compacted may go on with that once, under the feet of who took over from it."""


class Follower:
    """What the journal says so far. One thread at a time."""

    def __init__(self, journal: Journal, begin: Callable[[Durable], Shadow], remember: int):
        """`begin` makes the state of a snapshot; of so many newest merges what the tape needs is remembered."""
        self.journal = journal
        self._tail = Tail(journal)
        self._begin = begin
        self._shadow: Shadow | None = None
        self.merges: deque[dict[str, Any]] = deque(maxlen=remember)
        """Digest and `TOLD` of the newest merges since the snapshot that all this started from, oldest first."""

    @property
    def newest(self) -> int:
        """Highest sequence number seen in the journal."""
        return self._tail.newest

    def follow(self) -> None:
        """Apply what is new. Raises OSError, JournalDamaged and RecordDamaged, after which it may be tried again."""
        self._take(final=False)

    def catch_up(self) -> Shadow | None:
        """The state with all that is in the journal, once an epoch is claimed; None where nothing was ever written.

        Raises:
            OSError: the store can't be read.
            JournalDamaged: a record that others build on is missing or garbled.
        """
        for left in reversed(range(CATCH_UP_TRIES)):
            try:
                self._take(final=True)
                break
            except (FileNotFoundError, RecordDamaged):  # a snapshot may have what is not there
                if not left:
                    raise
        return self._shadow

    def _take(self, *, final: bool) -> None:
        try:
            self._apply(self._tail.news(final=final))
        except OSError:
            raise
        except Exception:
            self._tail, self._shadow = Tail(self.journal), None  # from the newest snapshot, when it is tried again
            raise

    def _apply(self, news: News) -> None:
        if news.base is not None:
            self._shadow = self._begin(_durable(news.base))
            self.merges.clear()
        for record in news.records:
            if self._shadow is None:
                raise JournalDamaged("records without a snapshot before them")
            self._shadow.apply(_durable(record))
            if record.meta["kind"] == "merge":
                told = {name: record.meta[name] for name in TOLD}
                self.merges.append({**told, "digest": self._shadow.fragments[told["fragment"]].digest})


def _durable(record: Record) -> Durable:
    return Durable(record.meta, record.tensors)
