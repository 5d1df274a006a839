"""Reports and contributions come in: everything stale, foreign or damaged is refused, counted, and harms nothing."""

from __future__ import annotations

from typing import Any

from app.diloco import cut
from app.diloco.events import Arrived
from app.diloco.job import Answer
from app.diloco.joining import known, leave
from app.diloco.machine import Machine
from app.diloco.members import Member
from app.diloco.merging import take_answer
from app.diloco.messages import UNKNOWN, Contribution, Refusal, Report, Sender
from app.diloco.rounds import Round
from app.diloco.whole import is_contribution, is_report, round_of, sender_of

NOT_MERGED = frozenset({Refusal.LATE, Refusal.STALE_BASE, Refusal.ALREADY_MERGED})
"""Refusals that say nothing against the work itself: its norm tells the guard what is usual all the same."""


def reported(machine: Machine, report: Report, now: float) -> None:
    """A learner's counters arrived."""
    if not is_report(report, len(machine.fragments)):
        _garbled(machine, report)
        return
    member = known(machine, report.sender)
    if member is None:
        return
    if not _take(machine, member, report, now):
        machine.refuse(Refusal.CORRUPT, member.learner, seq=report.seq)
        _count_garbage(machine, member)
    elif 0 < machine.settings.most_garbage <= max(member.full_pulls.values(), default=0):
        machine.refuse(Refusal.CORRUPT, member.learner, seq=report.seq, pulls=max(member.full_pulls.values()))
        leave(machine, member.learner, member.incarnation, "digest")


def arrived(machine: Machine, event: Arrived, now: float) -> None:
    """A contribution arrived, with the learner's counters at capture.

    A refused answer to the open round takes its learner out of it: nobody waits for another one.
    """
    given = event.contribution
    if not is_contribution(given, len(machine.fragments)):
        _garbled(machine, given)
        return
    learner = given.sender.learner
    member = known(machine, given.sender)
    if member is None:
        return
    round_ = machine.rounds.get(given.fragment)
    possible = _take(machine, member, given.report, now)
    refusal = _refusal(machine, event, round_) if possible else Refusal.CORRUPT
    guard = machine.guards[given.fragment]
    if refusal is not None:
        fields: dict[str, Any] = {"fragment": given.fragment, "round": given.round, "base": given.base_version}
        if refusal is Refusal.OUTLIER:
            fragment = machine.fragments[given.fragment]
            fields |= {"norm": event.norm, "usual": guard.usual}
            fragment.outliers[learner] = fragment.version
        elif refusal in NOT_MERGED and _sound(machine, event):
            guard.remember(learner, event.norm, given.c_steps)
        machine.refuse(refusal, learner, **fields)
        _take_out(machine, given.sender, given.fragment, given.round)
        if refusal is Refusal.CORRUPT:
            _count_garbage(machine, member)
        return
    member.garbage = 0
    assert round_ is not None  # refused otherwise
    assert event.delta is not None
    take_answer(machine, round_, Answer(given, event.delta, now), now)


def _garbled(machine: Machine, message: object) -> None:
    """What came as a message and is none: counted against its sender, where that much can be read."""
    sender = sender_of(message)
    if sender is None:
        machine.refuse(Refusal.CORRUPT, UNKNOWN)
    elif (member := known(machine, sender)) is not None:
        machine.refuse(Refusal.CORRUPT, member.learner)
        if (place := round_of(message)) is not None:
            _take_out(machine, sender, *place)
        _count_garbage(machine, member)


def _take_out(machine: Machine, sender: Sender, fragment: int, number: int) -> None:
    """The answer to this round was refused: it waits for no other one of this learner."""
    round_ = machine.rounds.get(fragment)
    if round_ is None or round_.id != number or sender.epoch != machine.epoch:
        return
    if not round_.answered(sender.learner):
        round_.gone.add(sender.learner)


def _count_garbage(machine: Machine, member: Member) -> None:
    """Who keeps sending garbage is fenced off: what is wrong with its process goes with it."""
    member.garbage += 1
    if member.garbage == machine.settings.most_garbage:
        leave(machine, member.learner, member.incarnation, "garbage")


def _take(machine: Machine, member: Member, report: Report, now: float) -> bool:
    """Take a report unless a newer one came before; False when it is garbage."""
    if not _possible(machine, member, report, now):
        return False
    if machine.books.report(report):
        member.hear(report, machine.clock.t, now)
        cut.saved(machine, report)
        for p, fragment in enumerate(machine.fragments):
            fragment.received(member.learner, report.held[p])
            waiting = machine.unreturned.get(p)
            if waiting is not None and report.held[p] >= waiting[0]:
                machine.merge_return.add(now - waiting[1])
                del machine.unreturned[p]
    return True


def _possible(machine: Machine, member: Member, report: Report, now: float) -> bool:
    """Whether a working learner can have sent this. One that is older than what is known is not looked at."""
    account = machine.books.account(report.sender.learner, report.sender.incarnation)
    if account is None or report.seq <= account.seq:
        return True
    return (
        all(held <= fragment.version for held, fragment in zip(report.held, machine.fragments, strict=True))
        and account.fits(report)
        and _fits_steps(machine, report.tokens - account.tokens, report.steps - account.steps)
        and member.pace.allows(report, machine.clock.t, now)
    )


def _fits_steps(machine: Machine, tokens: int, steps: int) -> bool:
    """Whether so many steps can have so many tokens."""
    return machine.most_step_tokens is None or tokens <= steps * machine.most_step_tokens


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
    if event.delta is None or not _base_possible(machine, given):
        return Refusal.CORRUPT
    if refusal := _base_refusal(machine, given):
        return refusal
    if not _counters_possible(machine, given):
        return Refusal.CORRUPT
    key = (given.sender.epoch, given.round)
    admitted = machine.guards[given.fragment].admits(learner, key, event.norm, given.c_steps)
    return None if admitted else Refusal.OUTLIER


def _sound(machine: Machine, event: Arrived) -> bool:
    """Whether nothing but its time speaks against this contribution."""
    given = event.contribution
    return event.delta is not None and _base_possible(machine, given) and _counters_possible(machine, given)


def _base_possible(machine: Machine, given: Contribution) -> bool:
    """Whether its learner can have started from this base: a version that there is, and that it had received."""
    p = given.fragment
    return given.base_version <= min(machine.fragments[p].version, given.report.held[p])


def _counters_possible(machine: Machine, given: Contribution) -> bool:
    """Garbage in the counters would become a garbage weight, and work with a fate would get a second one."""
    account = machine.books.account(given.sender.learner, given.sender.incarnation)
    return (
        account is not None
        and given.c_steps <= account.steps
        and given.c_tokens <= account.outstanding(given.fragment)
        and _fits_steps(machine, given.c_tokens, given.c_steps)
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
    return None if base in fragment.ring else Refusal.STALE_BASE
