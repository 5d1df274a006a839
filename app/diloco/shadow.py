"""The syncer's state as its journal tells it: record by record, without an epoch until somebody goes on from it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from app.diloco.accounts import Books
from app.diloco.average import average_weight, averaged
from app.diloco.codec import digest
from app.diloco.durable import Durable, Tensors
from app.diloco.fragments import Layout
from app.diloco.messages import Contained
from app.diloco.protocol import Protocol
from app.diloco.settings import DilocoSettings
from app.diloco.state import GlobalFragment


class Shadow:
    """All that is durable of a run, kept up with the journal."""

    def __init__(
        self,
        run_id: str,
        layout: Layout,
        settings: DilocoSettings,
        budget: int,
        state: Durable,
        most_step_tokens: int | None = None,
    ):
        """Start from a whole state. Raises ValueError when that belongs to another run or another layout."""
        meta = state.meta
        if meta["run_id"] != run_id or meta["layout"] != layout.hash:
            raise ValueError(f"the checkpoint is of run {meta['run_id']} with layout {meta['layout'][:12]}")
        self._run_id, self._layout, self._settings, self._budget = run_id, layout, settings, budget
        self._most_step_tokens = most_step_tokens
        self._numels = [fragment.numel for fragment in layout.fragments]
        self.fragments = [
            GlobalFragment.restored(p, entry["version"], entry["clock"], _four(state.tensors, f"{p}."), settings)
            for p, entry in enumerate(meta["fragments"])
        ]
        for fragment, entry in zip(self.fragments, meta["fragments"], strict=True):
            fragment.last_merged = dict(entry["last_merged"])
            fragment.contained = {
                learner: [Contained(**e) for e in entries] for learner, entries in entry["contained"].items()
            }
        self._guards = [entry["guard"] for entry in meta["fragments"]]
        self._incarnations: dict[str, int] = dict(meta["incarnations"])
        self._books, self._clock = Books.from_state(self._numels, meta["books"]), int(meta["clock"])

    def apply(self, record: Durable) -> None:
        """Take over the next record. Raises ValueError when it can't follow on what was there."""
        meta = record.meta
        if meta["kind"] == "join":
            learner = meta["learner"]
            self._incarnations[learner] = meta["incarnation"]
            self._books.open(learner, meta["incarnation"], meta["pool"], meta["token"])
            for fragment in self.fragments:
                fragment.forget(learner)
        else:
            self._take_merge(record)
            self._clock = max(self._clock, meta["clock"])
            self._guards[meta["fragment"]] = meta["guard"]

    def _take_merge(self, record: Durable) -> None:
        """A recorded version. Θ̄ is not in a record: it follows from those before, with the same bits."""
        meta = record.meta
        contains = tuple(Contained(**entry) for entry in meta["contains"])
        theta, theta_hat, momentum, _ = _four(record.tensors, "")
        fragment = self.fragments[meta["fragment"]]
        version = meta["version"]
        if version != fragment.version + 1:
            raise ValueError(f"fragment {fragment.index}: version {version} follows {fragment.version} in the journal")
        fragment.ring.push(version, None)
        weight = average_weight(self._settings, fragment.clock, meta["clock"], meta["share"] is not None)
        average = averaged(fragment.average, theta, weight)
        fragment.take(version, meta["clock"], (theta, theta_hat, momentum, average), digest(theta_hat))
        merged = [(fragment.index, contained) for contained in contains]
        self._books = Books.from_state(self._numels, meta["books"], merged)
        for contained in contains:
            if self._books.account(contained.learner, contained.incarnation) is not None:
                fragment.note_contained(contained)

    def protocol(self, epoch: int) -> Protocol:
        """The machine that goes on from here under a claimed epoch. The state is its own: apply nothing after this."""
        protocol = Protocol(
            run_id=self._run_id,
            epoch=epoch,
            layout=self._layout,
            settings=self._settings,
            budget=self._budget,
            most_step_tokens=self._most_step_tokens,
            fragments=self.fragments,
            clock=self._clock,
            books=self._books,
            incarnations=self._incarnations,
        )
        for guard, remembered in zip(protocol.guards, self._guards, strict=True):
            guard.take(remembered)
        return protocol


def restore(
    run_id: str,
    epoch: int,
    layout: Layout,
    settings: DilocoSettings,
    budget: int,
    state: Durable,
    later: Sequence[Durable],
    most_step_tokens: int | None = None,
) -> Protocol:
    """The machine as it was after the last durable record, under a new epoch.

    Raises ValueError when the state belongs to another run or another layout.
    """
    shadow = Shadow(run_id, layout, settings, budget, state, most_step_tokens)
    for record in later:
        shadow.apply(record)
    return shadow.protocol(epoch)


def _four(tensors: Tensors, prefix: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    theta = tensors[f"{prefix}theta"]
    theta_hat, average = tensors.get(f"{prefix}theta_hat", theta), tensors.get(f"{prefix}average", theta)
    return theta, theta_hat, tensors[f"{prefix}momentum"], average
