"""What the state machine remembers. The rules that read and change it have a file each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.diloco.accounts import Books
from app.diloco.clock import Estimate, GlobalClock
from app.diloco.events import Decision, Finish, Note, Wake
from app.diloco.fragments import Layout
from app.diloco.guard import NormGuard
from app.diloco.members import Member, Members
from app.diloco.messages import CutId, Hello, Refusal
from app.diloco.rounds import Round
from app.diloco.settings import DilocoSettings
from app.diloco.state import GlobalFragment


@dataclass
class OpenCut:
    """A consistent cut that is being made (`cut.py`)."""

    id: CutId
    waiting: dict[str, int]
    """Learner → incarnation of those that have not saved their part."""
    deadline: float
    saved: dict[str, int] = field(default_factory=dict)


class Machine:
    """The syncer's state. Built from the newest durable state, under an epoch that is claimed already."""

    def __init__(
        self,
        *,
        run_id: str,
        epoch: int,
        layout: Layout,
        settings: DilocoSettings,
        budget: int,
        most_step_tokens: int | None = None,
        fragments: Sequence[GlobalFragment],
        clock: int = 0,
        books: Books | None = None,
        incarnations: dict[str, int] | None = None,
    ):
        self.run_id, self.epoch = run_id, epoch
        self.layout, self.settings, self.budget = layout, settings, budget
        self.most_step_tokens = most_step_tokens
        """Tokens of the largest inner step of any learner; None: not known."""
        self.fragments = list(fragments)
        self.clock = GlobalClock(clock)
        self.books = books or Books([fragment.numel for fragment in layout.fragments])
        self.members = Members()
        """The incarnations that may give work: those with an open account, from the first step on."""
        self.incarnations = dict(incarnations or {})
        """Learner → newest incarnation issued."""
        self.joining: dict[str, tuple[Hello, int]] = {}
        """Hello token → hello and its incarnation, until that is durable."""
        self.started = False

        self.guards = [NormGuard(settings) for _ in layout.fragments]
        """What is usual of each fragment. Every record has it, so that a restart does not let everything pass."""
        self.rounds: dict[int, Round] = {}
        """Fragment → its open round."""
        self.round_ids = 0
        self.paused = False
        """Merges wait for learners or for the journal."""
        self.merge_return = Estimate()
        self.unreturned: dict[int, tuple[int, float]] = {}
        """Fragment → (version, time its round closed), until a learner has received it."""
        self.last_contributors = 0
        self.skipped_slots = 0
        """Times at which a fragment was due and no round was opened, under this epoch; each merge's event tells."""
        self.refusals: Counter[Refusal] = Counter()

        self.cut: OpenCut | None = None

        self.finishing: Finish | None = None
        self.finish_by = math.inf
        """The last rounds close."""
        self.look_at = math.inf
        """When time alone may end the run."""
        self.final_done: set[int] = set()
        """Fragments that had their last round."""
        self.ended = False
        self.out: list[Decision] = []

    @property
    def merges(self) -> int:
        """Merges of the whole run: each is one version."""
        return sum(fragment.version for fragment in self.fragments)

    def live(self, now: float) -> list[Member]:
        """The live learners, in learner-id order."""
        return self.members.live(now, self.settings)

    def note(self, kind: str, **fields: Any) -> None:
        """Decide on a line for the tape."""
        self.out.append(Note(kind, fields))

    def wake_all(self) -> None:
        """Decide to answer everybody's poll."""
        self.out.append(Wake(tuple(self.members)))

    def refuse(self, refusal: Refusal, learner: str, **fields: Any) -> None:
        """Count a refusal."""
        self.refusals[refusal] += 1
        self.note("refused", reason=refusal.value, learner=learner, **fields)
