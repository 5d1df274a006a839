"""Reports and contributions come in: everything stale, foreign or damaged is refused, counted, and harms nothing."""

from __future__ import annotations

import math
from typing import Any

from app.diloco import cut
from app.diloco.events import Arrived
from app.diloco.job import Answer
from app.diloco.joining import known, leave
from app.diloco.machine import Machine
from app.diloco.members import Member
from app.diloco.merging import take_answer
from app.diloco.messages import Contribution, Refusal, Report
from app.diloco.rounds import Round


def reported(machine: Machine, report: Report, now: float) -> None:
    """A learner's counters arrived."""
    member = known(machine, report.sender)
    if member is not None and not _take(machine, member, report, now):
        machine.refuse(Refusal.CORRUPT, member.learner, seq=report.seq)
        _count_garbage(machine, member)


def arrived(machine: Machine, event: Arrived, now: float) -> None:
    """A contribution arrived, with the learner's counters at capture.

    A refused answer to the open round takes its learner out of it: nobody waits for another one.
    """
    given = event.contribution
    learner = given.sender.learner
    member = known(machine, given.sender)
    if member is None:
        return
    round_ = machine.rounds.get(given.fragment)
    possible = _take(machine, member, given.report, now)
    refusal = _refusal(machine, event, round_) if possible else Refusal.CORRUPT
    if refusal is not None:
        fields: dict[str, Any] = {"fragment": given.fragment, "round": given.round, "base": given.base_version}
        if refusal is Refusal.OUTLIER:
            fragment = machine.fragments[given.fragment]
            fields |= {"norm": event.norm, "usual": machine.guards[given.fragment].usual}
            fragment.outliers[learner] = fragment.version
        machine.refuse(refusal, learner, **fields)
        meant = round_ is not None and given.round == round_.id and given.sender.epoch == machine.epoch
        if round_ is not None and meant and not round_.answered(learner):
            round_.gone.add(learner)
        if refusal is Refusal.CORRUPT:
            _count_garbage(machine, member)
        return
    member.garbage = 0
    assert round_ is not None  # refused otherwise
    assert event.delta is not None
    take_answer(machine, round_, Answer(given, event.delta, now), now)


def _count_garbage(machine: Machine, member: Member) -> None:
    """Who keeps sending garbage is fenced off: what is wrong with its process goes with it."""
    member.garbage += 1
    if member.garbage == machine.settings.most_garbage:
        leave(machine, member.learner, member.incarnation, "garbage")


def _take(machine: Machine, member: Member, report: Report, now: float) -> bool:
    """Take a report unless a newer one came before; False when it is garbage."""
    if not _possible(machine, report):
        return False
    if machine.books.report(report):
        member.hear(report, now)
        cut.saved(machine, report)
        for p, fragment in enumerate(machine.fragments):
            fragment.received(member.learner, report.held[p])
            waiting = machine.unreturned.get(p)
            if waiting is not None and report.held[p] >= waiting[0]:
                machine.merge_return.add(now - waiting[1])
                del machine.unreturned[p]
    return True


def _possible(machine: Machine, report: Report) -> bool:
    """Whether a working learner can have sent this. One that is older than what is known is not looked at."""
    account = machine.books.account(report.sender.learner, report.sender.incarnation)
    if account is None or report.seq <= account.seq:
        return True
    return (
        len(report.held) == len(report.discarded) == len(machine.fragments)
        and all(held <= fragment.version for held, fragment in zip(report.held, machine.fragments, strict=True))
        and report.clock >= 0
        and math.isfinite(report.step_time)
        and account.fits(report)
    )


def _refusal(machine: Machine, event: Arrived, round_: Round | None) -> Refusal | None:
    """Why this contribution of a living incarnation is refused; None when it is taken.

    `round_` is the open round of its fragment, if any. (`docs/protocol.md`, A contribution to the round that makes n+1)
    """
    given = event.contribution
    learner = given.sender.learner
    if given.sender.epoch != machine.epoch:
        return Refusal.EPOCH
    if round_ is None or given.round != round_.id:
        return Refusal.LATE
    if round_.answered(learner):
        return Refusal.DUPLICATE
    if round_.job is not None or learner not in round_.waiting:
        return Refusal.LATE
    if event.delta is None or not 0 <= given.base_version <= round_.version:
        return Refusal.CORRUPT
    if refusal := _base_refusal(machine, given):
        return refusal
    if not _counters_possible(machine, given):
        return Refusal.CORRUPT
    return None if machine.guards[given.fragment].admits(event.norm, given.c_steps) else Refusal.OUTLIER


def _counters_possible(machine: Machine, given: Contribution) -> bool:
    """Garbage in the counters would become a garbage weight, and work with a fate would get a second one."""
    account = machine.books.account(given.sender.learner, given.sender.incarnation)
    return (
        account is not None
        and 0 <= given.c_steps <= account.steps
        and 0 <= given.c_tokens <= account.outstanding(given.fragment)
    )


def _base_refusal(machine: Machine, given: Contribution) -> Refusal | None:
    fragment = machine.fragments[given.fragment]
    base = given.base_version
    if base == fragment.version:
        return None
    if fragment.last_merged.get(given.sender.learner, -1) > base:
        return Refusal.ALREADY_MERGED
    if machine.settings.late == "discard":
        return Refusal.LATE
    return None if fragment.ring.get(base) is not None else Refusal.STALE_BASE
