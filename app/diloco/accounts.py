"""The fate of all work: processed = merged + discarded + outstanding, in token × parameter units.

A token that a learner processed is work on every fragment; each fragment's share of it has exactly one fate. Counters
are cumulative within an incarnation, so a report may be lost or come twice. What became of an incarnation's samples
follows from what durable versions hold: the data ledger is told (`Consumed`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from app.diloco.messages import Consumed, Contained, Report


@dataclass
class Account:
    """One incarnation's work. Lists run over fragments and count tokens."""

    learner: str
    incarnation: int
    pool: str
    token: str
    """Of the hello that it joined with."""
    merged: list[int]
    discarded: list[dict[str, int]]
    steps: int = 0
    tokens: int = 0
    samples: int = 0
    """Taken, as far as it reported."""
    used: int = 0
    """The newest capture that a version holds was made after this many samples."""
    seq: int = -1
    claimed: list[int] = field(default_factory=list)
    """Tokens in a round's answer or in a merge that is not durable yet; their fate waits when the learner dies."""

    def outstanding(self, fragment: int) -> int:
        """Tokens of this fragment that have no fate yet."""
        return self.tokens - self.merged[fragment] - sum(self.discarded[fragment].values())

    def hold(self, fragment: int, contained: Contained) -> None:
        """A version of this fragment holds that contribution."""
        self.merged[fragment] += contained.c_tokens
        self.used = max(self.used, contained.samples)

    def discard_rest(self, reason: str) -> None:
        """Nothing but what is claimed stays outstanding."""
        for fragment, reasons in enumerate(self.discarded):
            if left := self.outstanding(fragment) - self.claimed[fragment]:
                reasons[reason] = reasons.get(reason, 0) + left

    def fits(self, report: Report) -> bool:
        """Whether these counters are possible: cumulative, and no work has two fates."""
        if report.tokens < self.tokens or report.steps < self.steps or report.samples < self.samples:
            return False
        spoken_for = [merged + claimed for merged, claimed in zip(self.merged, self.claimed, strict=True)]
        return all(
            min(reasons.values(), default=0) >= 0 and taken + sum(reasons.values()) <= report.tokens
            for taken, reasons in zip(spoken_for, report.discarded, strict=True)
        )


@dataclass(frozen=True)
class Balance:
    """All work of a run, integers in token × parameter units."""

    parameters: int
    processed: int
    merged: int
    discarded: dict[str, int]
    outstanding: int

    @property
    def exact(self) -> bool:
        """Whether every unit has one fate, and none has two."""
        gone = self.merged + sum(self.discarded.values())
        return self.outstanding >= 0 and self.processed == gone + self.outstanding


class Books:
    """Accounts of the living incarnations, and totals of those that ended."""

    def __init__(self, numels: Sequence[int]):
        self._numels = list(numels)
        self._open: dict[str, Account] = {}
        self._dying: list[Account] = []
        self.closed_tokens = 0
        self._closed = {"merged": 0, "processed": 0}
        self._closed_discarded: dict[str, int] = {}
        self.per_learner: dict[str, dict[str, int]] = {}
        """Steps and tokens of each learner's ended incarnations."""
        self.ended: dict[tuple[str, int], Consumed] = {}
        """What became of the samples of ended incarnations, until the data ledger knows it."""

    @property
    def tokens(self) -> int:
        """Tokens processed by all incarnations, living and ended."""
        return self.closed_tokens + sum(account.tokens for account in self._accounts())

    @property
    def living(self) -> list[Account]:
        """Accounts of the incarnations that may still give work, in learner-id order. Read only."""
        return [self._open[learner] for learner in sorted(self._open)]

    def learner_totals(self, learner: str) -> tuple[int, int]:
        """(steps, tokens) of all incarnations of one learner."""
        ended = self.per_learner.get(learner, {"steps": 0, "tokens": 0})
        accounts = [account for account in self._accounts() if account.learner == learner]
        steps, tokens = sum(a.steps for a in accounts), sum(a.tokens for a in accounts)
        return ended["steps"] + steps, ended["tokens"] + tokens

    def open(self, learner: str, incarnation: int, pool: str, token: str) -> None:
        """Start the account of a new incarnation; an older one of the same learner ends as died."""
        if learner in self._open:
            self.close(learner, self._open[learner].incarnation, "died")
        parts = len(self._numels)
        fates: list[dict[str, int]] = [{} for _ in range(parts)]
        self._open[learner] = Account(learner, incarnation, pool, token, [0] * parts, fates, claimed=[0] * parts)

    def account(self, learner: str, incarnation: int) -> Account | None:
        """The account of an incarnation that may still give work. Read only."""
        account = self._open.get(learner)
        return account if account is not None and account.incarnation == incarnation else None

    def report(self, report: Report) -> bool:
        """Take a report's counters; False when it is older than what is known or of another incarnation."""
        account = self.account(report.sender.learner, report.sender.incarnation)
        if account is None or report.seq <= account.seq:
            return False
        account.seq, account.steps, account.tokens = report.seq, report.steps, report.tokens
        account.samples = report.samples
        account.discarded = [dict(reasons) for reasons in report.discarded]
        return True

    def claim(self, fragment: int, learner: str, incarnation: int, tokens: int) -> None:
        """This many tokens are in an answer that a round took: at most what is outstanding."""
        self._find(learner, incarnation).claimed[fragment] = tokens

    def release(self, fragment: int, learner: str, incarnation: int) -> None:
        """The round of that answer ended without a version."""
        self.claim(fragment, learner, incarnation, 0)
        self._settle()

    def merged(self, fragment: int, contained: Contained) -> None:
        """A version that holds this contribution is durable."""
        account = self._find(contained.learner, contained.incarnation)
        account.hold(fragment, contained)
        account.claimed[fragment] = 0
        self._settle()

    def consumed(self, contains: Sequence[Contained] = ()) -> tuple[Consumed, ...]:
        """What is known of every incarnation's samples once a version that `contains` this is durable."""
        used = {(c.learner, c.incarnation): c.samples for c in contains}
        going_on = tuple(
            Consumed(a.learner, a.incarnation, max(a.used, used.get((a.learner, a.incarnation), 0)), a.samples, False)
            for a in self._accounts()
        )
        return (*going_on, *self.ended.values())

    def told(self, consumed: Sequence[Consumed]) -> None:
        """The data ledger knows this, for good."""
        for entry in consumed:
            self.ended.pop((entry.learner, entry.incarnation), None)

    def close(self, learner: str, incarnation: int, reason: str) -> None:
        """This incarnation gives nothing more: what is outstanding is discarded for `reason`.

        What a merge under way claims waits for it; when that merge comes to nothing it is `died`.
        """
        account = self.account(learner, incarnation)
        if account is None:
            return
        del self._open[learner]
        account.discard_rest(reason)
        self._dying.append(account)
        self._settle()

    def close_all(self, reason: str) -> None:
        """The run ends: nothing is outstanding any more."""
        for account in self.living:
            self.close(account.learner, account.incarnation, reason)

    def balance(self) -> Balance:
        """All work so far. `exact` on it must hold at every moment."""
        merged, processed = self._closed["merged"], self._closed["processed"]
        discarded = dict(self._closed_discarded)
        outstanding = 0
        for account in self._accounts():
            for fragment, numel in enumerate(self._numels):
                processed += account.tokens * numel
                merged += account.merged[fragment] * numel
                outstanding += account.outstanding(fragment) * numel
                _add(discarded, account.discarded[fragment], numel)
        return Balance(sum(self._numels), processed, merged, discarded, outstanding)

    def _accounts(self) -> Iterator[Account]:
        yield from self._open.values()
        yield from self._dying

    def _find(self, learner: str, incarnation: int) -> Account:
        for account in self._accounts():
            if account.learner == learner and account.incarnation == incarnation:
                return account
        raise KeyError(f"no account of {learner}#{incarnation}")

    def _settle(self) -> None:
        """Fold ended accounts into the totals once none of their work is claimed."""
        still_dying = []
        for account in self._dying:
            account.discard_rest("died")
            if any(account.claimed):
                still_dying.append(account)
                continue
            self.closed_tokens += account.tokens
            for fragment, numel in enumerate(self._numels):
                self._closed["processed"] += account.tokens * numel
                self._closed["merged"] += account.merged[fragment] * numel
                _add(self._closed_discarded, account.discarded[fragment], numel)
            ended = self.per_learner.setdefault(account.learner, {"steps": 0, "tokens": 0})
            ended["steps"] += account.steps
            ended["tokens"] += account.tokens
            who = (account.learner, account.incarnation)
            self.ended[who] = Consumed(*who, account.used, account.samples, True)
        self._dying = still_dying

    def state(self) -> dict[str, Any]:
        """JSON-able private copy for the journal. What is claimed is not durable and is left out."""
        state = {
            "open": [
                {
                    "learner": a.learner,
                    "incarnation": a.incarnation,
                    "pool": a.pool,
                    "token": a.token,
                    "merged": a.merged,
                    "discarded": a.discarded,
                    "steps": a.steps,
                    "tokens": a.tokens,
                    "samples": a.samples,
                    "used": a.used,
                    "seq": a.seq,
                    "dying": a in self._dying,
                }
                for a in self._accounts()
            ],
            "closed_tokens": self.closed_tokens,
            "closed": self._closed,
            "closed_discarded": self._closed_discarded,
            "per_learner": self.per_learner,
            "ended": [asdict(entry) for entry in self.ended.values()],
        }
        return copy.deepcopy(state)

    @classmethod
    def from_state(
        cls, numels: Sequence[int], state: dict[str, Any], merged: Sequence[tuple[int, Contained]] = ()
    ) -> Books:
        """The inverse of `state`, plus merges (fragment, contained) that became durable with it.

        Work of a dead incarnation that was in a merge which never became durable is `died`.
        """
        books = cls(numels)
        books.closed_tokens = state["closed_tokens"]
        books._closed = dict(state["closed"])
        books._closed_discarded = dict(state["closed_discarded"])
        books.per_learner = {k: dict(v) for k, v in state["per_learner"].items()}
        ended = [Consumed(**entry) for entry in state.get("ended", ())]
        books.ended = {(entry.learner, entry.incarnation): entry for entry in ended}
        for entry in copy.deepcopy(state["open"]):
            dying = entry.pop("dying")
            account = Account(**entry, claimed=[0] * len(books._numels))
            if dying:
                books._dying.append(account)
            else:
                books._open[account.learner] = account
        for fragment, contained in merged:
            books._find(contained.learner, contained.incarnation).hold(fragment, contained)
        books._settle()
        return books


def _add(total: dict[str, int], tokens: dict[str, int], numel: int) -> None:
    for reason, count in tokens.items():
        total[reason] = total.get(reason, 0) + count * numel
