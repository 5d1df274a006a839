"""What a learner is told when it polls: the asks it has not heard of and the versions it has not received."""

from __future__ import annotations

from app.diloco.machine import Machine
from app.diloco.messages import Ask, CutId, Reply, Report
from app.diloco.whole import is_report, sender_of


def reply_to(machine: Machine, report: Report, now: float) -> tuple[Reply, bool]:
    """The answer to a poll with this report, and whether it is worth waking a parked poll for."""
    epoch, t, tokens, live = machine.epoch, machine.clock.t, machine.books.tokens, len(machine.live(now))
    sender = sender_of(report)
    member = None if sender is None else machine.members.get(sender.learner)
    if sender is None or sender.run_id != machine.run_id or member is None or member.incarnation != sender.incarnation:
        return Reply(epoch, t, tokens, live, fenced=True), True
    if not is_report(report, len(machine.fragments)):
        return Reply(epoch, t, tokens, live), True
    heard = report.heard if sender.epoch == epoch else 0
    asks = tuple(
        Ask(round_.fragment, round_.id, epoch, round_.version)
        for round_ in machine.rounds.values()
        if round_.id > heard and round_.job is None and sender.learner in round_.waiting
    )
    offers = tuple(
        fragment.offer_for(sender.learner, held, epoch, full=p in report.need_full)
        for p, (fragment, held) in enumerate(zip(machine.fragments, report.held, strict=True))
        if fragment.version > held
    )
    for offer in offers:
        if offer.fragment in report.need_full:
            member.full_pulls[offer.fragment] = member.full_pulls.get(offer.fragment, 0) + 1
    finish = machine.finishing is not None
    cut = _cut_for(machine, report)
    urgent = bool(asks or offers or (finish and not report.idle) or sender.epoch != epoch or cut)
    return Reply(epoch, t, tokens, live, asks, offers, finish, cut=cut), urgent


def _cut_for(machine: Machine, report: Report) -> CutId | None:
    """The cut for which this learner has not copied its state yet."""
    cut, sender = machine.cut, report.sender
    wanted = cut is not None and cut.waiting.get(sender.learner) == sender.incarnation and report.cut_taken != cut.id
    return cut.id if cut is not None and wanted else None
