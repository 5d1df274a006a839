"""The end of a run: one last round of all fragments, within a deadline (`docs/protocol.md`, Start, end, evaluation)."""

from __future__ import annotations

from app.diloco.events import Ended, Finish
from app.diloco.machine import Machine
from app.diloco.merging import drop, open_round


def finish(machine: Machine, event: Finish, now: float) -> None:
    """Tell learners to stop stepping; rounds that are open close in time for the last ones."""
    if machine.finishing is not None:
        return
    machine.finishing = event
    machine.finish_by = now + event.deadline_s
    machine.look_at = machine.finish_by
    for round_ in machine.rounds.values():
        round_.deadline = min(round_.deadline, machine.finish_by)
    machine.note("finish", reason=event.reason, tokens=machine.books.tokens, clock=machine.clock.t)
    machine.wake_all()


def open_final(machine: Machine, now: float) -> None:
    """Ask for every fragment that had no last round yet and is free."""
    live = machine.live(now)
    for p in range(machine.settings.fragments):
        if p not in machine.rounds and p not in machine.final_done and now < machine.finish_by:
            open_round(machine, p, live, now, machine.finish_by, final=True)


def end_if_over(machine: Machine, now: float) -> None:
    """End the run when every fragment had its last round, or when time is up."""
    if machine.finishing is None or not _over(machine, machine.finishing, now):
        return
    for round_ in list(machine.rounds.values()):
        machine.note("merge_given_up", round=round_.id, fragment=round_.fragment)
        drop(machine, round_)
    machine.ended = True
    machine.books.close_all("unfinished")
    machine.note("ended", reason=machine.finishing.reason)
    machine.out.append(Ended(machine.finishing.reason))


def _over(machine: Machine, event: Finish, now: float) -> bool:
    """After the deadline every round is closed: what the journal refused is given up at once.

    A journal that has not answered gets as long again: it can't hold up the end for ever.
    """
    if len(machine.final_done) == machine.settings.fragments:
        return True
    if now < machine.finish_by:
        return False
    machine.look_at = machine.finish_by + event.deadline_s
    return now >= machine.look_at or all(round_.failed for round_ in machine.rounds.values())
