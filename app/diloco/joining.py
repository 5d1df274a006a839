"""Who is who: learners join, leave, and are known by run, learner and incarnation (`docs/protocol.md`, Who is who)."""

from __future__ import annotations

from app.diloco import cut
from app.diloco.events import Deny, Grant, Record, Wake
from app.diloco.machine import Machine
from app.diloco.members import Member
from app.diloco.messages import UNKNOWN, Hello, Refusal, Sender, Welcome
from app.diloco.pace import Pace
from app.diloco.whole import is_hello


def remember(machine: Machine, now: float) -> None:
    """At the first step: the incarnations that the journal knows as living are members.

    They are asked and waited for like others, until they are silent for too long.
    """
    for account in machine.books.living:
        who = (account.learner, account.incarnation, account.pool, account.token)
        t = machine.clock.t
        machine.members[account.learner] = Member(*who, now, t, Pace.remembered(now, account.steps, t))


def join(machine: Machine, hello: Hello) -> None:
    """Issue an incarnation and have it recorded; the same hello twice gives one."""
    if not is_hello(hello):
        machine.refuse(Refusal.CORRUPT, UNKNOWN)
        return  # whoever can send no hello is told so by whoever took it
    member = machine.members.get(hello.learner)
    if hello.token in machine.joining:
        return  # the answer to the first one is the answer
    if machine.ended:
        machine.out.append(Deny(hello.token, "the run has ended"))
    elif hello.run_id != machine.run_id:
        machine.refuse(Refusal.FOREIGN, hello.learner, run_id=hello.run_id)
        machine.out.append(Deny(hello.token, f"this syncer serves run {machine.run_id}, not {hello.run_id}"))
    elif hello.layout_hash != machine.layout.hash:
        machine.refuse(Refusal.CORRUPT, hello.learner, layout_hash=hello.layout_hash)
        machine.out.append(Deny(hello.token, "the layout of the learner's model differs from the syncer's"))
    elif member is not None and member.token == hello.token:
        machine.out.append(Grant(hello.token, _welcome(machine, member)))
    else:
        incarnation = machine.incarnations.get(hello.learner, 0) + 1
        machine.incarnations[hello.learner] = incarnation
        machine.joining[hello.token] = (hello, incarnation)
        who = {"learner": hello.learner, "incarnation": incarnation, "pool": hello.pool}
        machine.out.append(Record(hello.token, {"kind": "join", **who, "token": hello.token}))


def admit(machine: Machine, token: str, now: float) -> None:
    """The incarnation is durable: older ones are refused from now on."""
    if token not in machine.joining:
        return
    hello, incarnation = machine.joining.pop(token)
    learner = hello.learner
    if machine.incarnations[learner] != incarnation:
        machine.out.append(Deny(token, "a newer process of this learner has joined"))
        return
    if old := machine.members.get(learner):
        leave(machine, learner, old.incarnation, "superseded")
    t = machine.clock.t
    member = Member(learner, incarnation, hello.pool, hello.token, now, t, Pace.joined(now, t))
    machine.members[learner] = member
    machine.books.open(learner, incarnation, hello.pool, hello.token)
    machine.out.append(Grant(token, _welcome(machine, member)))
    start = {"timeline": dict(hello.timeline), "cpu_s": hello.cpu_s}
    machine.note("join", learner=learner, incarnation=incarnation, pool=hello.pool, **start)


def deny(machine: Machine, token: str) -> None:
    """The incarnation could not be made durable."""
    machine.joining.pop(token, None)
    machine.out.append(Deny(token, "the journal can't be written", again=True))


def leave(machine: Machine, learner: str, incarnation: int, reason: str) -> None:
    """This incarnation gives nothing more; open rounds go on without it, decided merges keep its work."""
    member = machine.members.get(learner)
    if member is None or member.incarnation != incarnation:
        return
    del machine.members[learner]
    for round_ in machine.rounds.values():
        if round_.job is None:
            if learner in round_.answers:
                machine.books.release(round_.fragment, learner, incarnation)
            round_.leave_out(learner)
    for fragment in machine.fragments:
        fragment.forget(learner)
    machine.books.close(learner, incarnation, "died")
    cut.left(machine, learner, incarnation)
    machine.note("leave", learner=learner, incarnation=incarnation, reason=reason)
    machine.out.append(Wake((learner,)))


def known(machine: Machine, sender: Sender) -> Member | None:
    """The member behind a message; None, and a refusal, for everybody else."""
    member = machine.members.get(sender.learner)
    if sender.run_id != machine.run_id:
        machine.refuse(Refusal.FOREIGN, sender.learner, run_id=sender.run_id)
    elif member is None or member.incarnation != sender.incarnation:
        machine.refuse(Refusal.INCARNATION, sender.learner, incarnation=sender.incarnation)
    else:
        return member
    return None


def _welcome(machine: Machine, member: Member) -> Welcome:
    sender = Sender(machine.run_id, machine.epoch, member.learner, member.incarnation)
    offers = tuple(f.offer_for(member.learner, f.version, machine.epoch, full=True) for f in machine.fragments)
    at_work = {
        name: other.report.steps
        for name, other in machine.members.items()
        if name != member.learner and other.report is not None and other.last_merged_at is not None
    }
    account = machine.books.account(member.learner, member.incarnation)
    seq = -1 if account is None else account.seq
    donors = tuple(sorted(at_work, key=lambda name: (-at_work[name], name)))
    return Welcome(sender, machine.clock.t, offers, machine.books.tokens, machine.finishing is not None, seq, donors)
