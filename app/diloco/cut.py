"""A consistent cut: the syncer's state of one moment, and of each learner one that knows of nothing that came after it.

Chandy and Lamport's snapshot (1985), where the channel is the poll: from that moment on every reply to a learner
carries the marker until the learner has copied its state, which it does before it receives anything of that reply.
So all that it has received is older than the marker. What it sent may be newer than the syncer's state: such work is
in its own copy, and outstanding there. Nobody stops.
"""

from __future__ import annotations

from app.diloco.events import CutBegun, CutDone, CutGivenUp
from app.diloco.machine import Machine, OpenCut
from app.diloco.messages import Report


def mark(machine: Machine, number: int, deadline_s: float, now: float) -> None:
    """Begin a cut of all members, unless one is being made. There is nobody to save one once the run has ended."""
    if machine.cut is not None:
        return
    waiting = {member.learner: member.incarnation for member in machine.members.values()}
    machine.cut = OpenCut((machine.epoch, number), waiting, now + deadline_s)
    machine.out.append(CutBegun(machine.cut.id))
    machine.wake_all()
    _progress(machine)


def saved(machine: Machine, report: Report) -> None:
    """A report says which cut its sender has saved last."""
    cut, sender = machine.cut, report.sender
    if cut is not None and report.cut_saved == cut.id and cut.waiting.get(sender.learner) == sender.incarnation:
        del cut.waiting[sender.learner]
        cut.saved[sender.learner] = sender.incarnation
        _progress(machine)


def left(machine: Machine, learner: str, incarnation: int) -> None:
    """This incarnation gives nothing more: the cut is made without it, as if it had died right after."""
    if machine.cut is not None and machine.cut.waiting.get(learner) == incarnation:
        del machine.cut.waiting[learner]
        _progress(machine)


def give_up_late(machine: Machine, now: float) -> None:
    """A cut that somebody does not save in time, or before the run ends, is none."""
    if machine.cut is not None and (machine.ended or now >= machine.cut.deadline):
        machine.out.append(CutGivenUp(machine.cut.id, tuple(machine.cut.waiting)))
        machine.cut = None


def _progress(machine: Machine) -> None:
    cut = machine.cut
    if cut is None or cut.waiting:
        return
    machine.out.append(CutDone(cut.id, dict(cut.saved)) if cut.saved else CutGivenUp(cut.id, ()))
    machine.cut = None
