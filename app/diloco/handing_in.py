"""How a learner leaves in an orderly manner: it stops stepping, hands in what it has, and is let go.

It says so with `Report.leaving`. Each fragment that it has work on gets a round of its own, at once: one that is open
already serves as well, if it has not been answered yet. Others are asked as in every round and nobody is waited for
longer; where a round closes before its answer is there, the fragment gets another one. When no round can take more of
it, it is let go: the next reply says that it is fenced. Whoever has less time than that just goes; what was not merged
then is `died`.
"""

from __future__ import annotations

from app.diloco.joining import leave
from app.diloco.machine import Machine
from app.diloco.members import Member
from app.diloco.merging import open_round

TRIES = 3
"""Rounds of a fragment that wait for a leaving learner: one that does not answer must not have merges made for ever."""
LEFT = "left"
"""Why a learner that handed in is no member any more."""


def hand_in(machine: Machine, now: float) -> None:
    """Open the rounds that leaving learners need, and let go those that have no more to give."""
    leaving = [member for member in machine.live(now) if member.report is not None and member.report.leaving]
    for member in leaving:
        wanted = [p for p in range(machine.settings.fragments) if _has_work(machine, member, p)]
        for p in wanted:
            if p not in machine.rounds and _may_try(member, p) and not machine.paused:
                settings = machine.settings
                open_round(machine, p, machine.live(now), now, now + settings.round_deadline_s, final=False)
        for p, round_ in machine.rounds.items():
            if member.learner in round_.waiting:
                member.handed_in.setdefault(p, set()).add(round_.id)  # what it answers now is all it has
        if not any(_is_awaited(machine, member, p) for p in wanted):
            leave(machine, member.learner, member.incarnation, LEFT)


def _has_work(machine: Machine, member: Member, p: int) -> bool:
    account = machine.books.account(member.learner, member.incarnation)
    return account is not None and account.outstanding(p) > 0


def _is_awaited(machine: Machine, member: Member, p: int) -> bool:
    """Whether a round of the fragment is open or still to come for it."""
    return p in machine.rounds or _may_try(member, p)


def _may_try(member: Member, p: int) -> bool:
    return len(member.handed_in.get(p, ())) < TRIES
