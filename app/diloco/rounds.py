"""One round: who was asked, who answered, and when it closes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from app.diloco.job import Answer, MergeJob


class Verdict(Enum):
    """What a round wants now."""

    WAIT = "wait"  # for its quorum, its grace window or its deadline; then MERGE or GIVE_UP
    MERGE = "merge"  # close with the answers it has
    GIVE_UP = "give_up"  # close without a version: fewer than K learners had work


@dataclass
class Round:
    """An open round of one fragment, from the ask until its version is published. Times in seconds."""

    id: int
    fragment: int
    version: int
    """The version n it starts from."""
    asked: tuple[str, ...]
    quorum: int
    """K."""
    opened_at: float
    deadline: float
    final: bool
    """The last round of a run waits for everybody until its deadline."""
    answers: dict[str, Answer] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    """Learners that answered without work: w = 0 does not count toward K."""
    gone: set[str] = field(default_factory=set)
    """Learners that died, or whose answer was refused, in this round."""
    quorum_at: float | None = None
    close_at: float | None = None
    closed_at: float | None = None
    job: MergeJob | None = None
    retry_at: float | None = None
    """When the job is tried again after a journal failure; infinite while that try is under way."""

    @property
    def waiting(self) -> set[str]:
        """Asked learners that have not answered yet."""
        return set(self.asked) - set(self.answers) - self.empty - self.gone

    @property
    def enough(self) -> bool:
        """Whether K learners with work have answered."""
        return len(self.answers) >= self.quorum

    @property
    def failed(self) -> bool:
        """Whether its version could not be made durable, and no new try is under way."""
        return self.retry_at is not None and math.isfinite(self.retry_at)

    def answered(self, learner: str) -> bool:
        """Whether this learner's answer was taken already."""
        return learner in self.answers or learner in self.empty

    def leave_out(self, learner: str) -> None:
        """A learner that is not in this round any more; one that loses its quorum waits for another.

        The caller makes sure that the merge is not decided yet.
        """
        self.answers.pop(learner, None)
        self.empty.discard(learner)
        self.gone.add(learner)
        if not self.enough:
            self.quorum_at = self.close_at = None

    def verdict(self, now: float) -> Verdict:
        """Wait, merge or give up (`docs/algorithm.md`, syncer 2 and 3)."""
        if not self.waiting or now >= self.deadline:
            return Verdict.MERGE if self.enough else Verdict.GIVE_UP
        if len(self.answers) + len(self.waiting) < self.quorum:
            return Verdict.GIVE_UP
        if not self.final and self.close_at is not None and now >= self.close_at:
            return Verdict.MERGE
        return Verdict.WAIT

    @property
    def wake_at(self) -> float:
        """When time alone changes the verdict, or a failed publication is tried again."""
        if self.job is not None:
            return math.inf if self.retry_at is None else self.retry_at
        if self.close_at is None or self.final:
            return self.deadline
        return min(self.deadline, self.close_at)
