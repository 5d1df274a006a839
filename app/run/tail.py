"""Reads a journal while somebody else writes it: each record once, in order, also when it is compacted meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.run.journal import Journal
from app.run.record import Record


@dataclass(frozen=True)
class News:
    """What a look at the journal found."""

    base: Record | None = None
    """A snapshot to start over from, before the records; None: they follow on what was read before."""
    records: list[Record] = field(default_factory=list)
    """Without claims, oldest first."""


class Tail:
    """A place in a journal.

    The newest record is left alone until another follows it: a writer that does not know whether it arrived may put a
    different one in its place. A claim is such a follower, so whoever claims reads all (`final`).
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._seq: int | None = None
        """Everything up to here was read; None before the first look."""
        self.newest = 0
        """Highest sequence number seen: it rises while somebody writes."""

    def news(self, *, final: bool = False) -> News:
        """What was added since the last look. After an error the next look does the same again.

        Raises:
            OSError: the store can't be read, or was compacted during this look.
            JournalDamaged, RecordDamaged: a record that others follow can't be read.
        """
        seqs = self._journal.seqs()
        self.newest = max([self.newest, *seqs])
        last = max(seqs, default=0) - (0 if final else 1)
        due = [] if self._seq is None else [seq for seq in seqs if self._seq < seq <= last]
        if self._seq is None or due != list(range(self._seq + 1, last + 1)):
            return self._from_snapshot(last)
        records = [self._journal.read(seq) for seq in due]
        self._seq = max(self._seq, last)
        return News(records=[record for record in records if not record.claim])

    def _from_snapshot(self, last: int) -> News:
        """Start over: it is the first look, or what comes next has been compacted into a snapshot."""
        base, records = self._journal.load()
        self._seq = max(last, base.seq if base is not None else 0)
        return News(base, [record for record in records if record.seq <= last])
