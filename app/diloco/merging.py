"""The life of a round: due, asked, answered, closed, published (`docs/algorithm.md`, syncer 1 to 3 and 8)."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

from app.diloco.clock import due_slots, grace_window
from app.diloco.events import AT_BUDGET, Merge, Wake
from app.diloco.job import Answer, MergeJob, MergeResult
from app.diloco.machine import Machine
from app.diloco.members import Member
from app.diloco.rounds import Round, Verdict


def open_due(machine: Machine, now: float) -> None:
    """Advance the clock and open the rounds of the fragments that fell due, unless merges are paused."""
    settings = machine.settings
    live = machine.live(now)
    before = machine.clock.t
    t = machine.clock.advance([member.clock for member in live], settings.min_quorum)
    journal_failing = any(round_.retry_at is not None for round_ in machine.rounds.values())
    paused = len(live) < settings.min_quorum or journal_failing
    if paused != machine.paused:
        machine.paused = paused
        machine.note("paused" if paused else "resumed", live=len(live))
    due, skipped = due_slots(before, t, settings.fragments, settings.sync_interval)
    machine.skipped_slots += skipped
    for p in due:
        if paused or p in machine.rounds:
            machine.skipped_slots += 1
        else:
            open_round(machine, p, live, now, now + settings.round_deadline_s, final=False)


def open_round(machine: Machine, p: int, live: list[Member], now: float, deadline: float, final: bool) -> None:
    """Ask every live learner for fragment p."""
    machine.round_ids += 1
    asked = tuple(member.learner for member in live)
    machine.rounds[p] = Round(
        id=machine.round_ids,
        fragment=p,
        version=machine.fragments[p].version,
        asked=asked,
        quorum=1 if _to_mean(machine, final) else machine.settings.min_quorum,
        opened_at=now,
        deadline=deadline,
        final=final,
    )
    machine.out.append(Wake(asked))


def _to_mean(machine: Machine, final: bool) -> bool:
    """Whether a round ends the run with the mean of the learners' weights: of all that are left, be they under K."""
    at_budget = machine.finishing is not None and machine.finishing.reason == AT_BUDGET
    return final and at_budget and machine.settings.last_round == "mean"


def take_answer(machine: Machine, round_: Round, answer: Answer, now: float) -> None:
    """A contribution that was not refused; the K-th with work starts the grace window."""
    given = answer.contribution
    if answer.weight <= 0:
        round_.empty.add(given.sender.learner)
        return
    round_.answers[given.sender.learner] = answer
    machine.books.claim(round_.fragment, given.sender.learner, given.sender.incarnation, given.c_tokens)
    if round_.quorum_at is None and round_.enough:
        round_.quorum_at = now
        round_.close_at = now + _grace(machine, now, now - round_.opened_at)


def _grace(machine: Machine, now: float, time_to_quorum: float) -> float:
    """The window from the median step time of the learners that set the clock (`docs/algorithm.md`, syncer 3)."""
    setters = [member for member in machine.live(now) if member.clock >= machine.clock.t]
    pace = [member.step_time for member in setters if member.step_time > 0]
    return grace_window(
        machine.settings.overlap_steps,
        statistics.median(pace) if pace else 0.0,
        time_to_quorum,
        machine.merge_return.value,
        machine.settings.grace_safety,
    )


def close_due(machine: Machine, now: float) -> None:
    """Close the rounds whose time has come, and try again what the journal could not take."""
    for round_ in list(machine.rounds.values()):
        if round_.job is not None:
            if round_.retry_at is not None and now >= round_.retry_at:
                round_.retry_at = math.inf
                machine.out.append(Merge(round_.job))
            continue
        verdict = round_.verdict(now)
        if verdict is Verdict.GIVE_UP:
            fields = {"asked": list(round_.asked), "answers": sorted(round_.answers)}
            machine.note("round_given_up", round=round_.id, fragment=round_.fragment, **fields)
            drop(machine, round_)
        elif verdict is Verdict.MERGE:
            round_.closed_at = now
            round_.job = _job(machine, round_)
            machine.out.append(Merge(round_.job))


def drop(machine: Machine, round_: Round) -> None:
    """End a round without a version: what its answers held is outstanding again."""
    for answer in round_.answers.values():
        sender = answer.contribution.sender
        machine.books.release(round_.fragment, sender.learner, sender.incarnation)
    _end(machine, round_)


def _end(machine: Machine, round_: Round) -> None:
    del machine.rounds[round_.fragment]
    if round_.final:
        machine.final_done.add(round_.fragment)


def _job(machine: Machine, round_: Round) -> MergeJob:
    fragment = machine.fragments[round_.fragment]
    return MergeJob(
        fragment=machine.layout.fragments[round_.fragment],
        layout=machine.layout,
        settings=machine.settings,
        epoch=machine.epoch,
        round=round_.id,
        version=fragment.version + 1,
        clock=machine.clock.t,
        clock_before=fragment.clock,
        theta=fragment.theta,
        theta_hat=fragment.theta_hat,
        momentum=fragment.momentum,
        average=fragment.average,
        answers=tuple(round_.answers[learner] for learner in sorted(round_.answers)),
        share=len(round_.answers) / len(round_.asked) if _to_mean(machine, round_.final) else None,
    )


def published(machine: Machine, result: MergeResult, now: float) -> None:
    """A version is durable: it becomes the global one and is offered to everybody."""
    round_ = machine.rounds.get(result.fragment)
    if round_ is None or round_.id != result.round:
        return  # told twice, or given up at the end of the run
    _end(machine, round_)
    fragment = machine.fragments[result.fragment]
    fragment.apply(result)
    machine.last_contributors = len(result.contains)
    for contained in result.contains:
        machine.books.merged(result.fragment, contained)
        member = machine.members.get(contained.learner)
        if member is not None and member.incarnation == contained.incarnation:
            fragment.note_contained(contained)
            _merged_member(machine, member, result, now)
    machine.unreturned[result.fragment] = (result.version, now if round_.closed_at is None else round_.closed_at)
    machine.note("merge", **_merge_fields(machine, round_, result, now))
    machine.wake_all()


def _merged_member(machine: Machine, member: Member, result: MergeResult, now: float) -> None:
    member.last_merged_at = now
    if not member.announced_first_merge:
        member.announced_first_merge = True
        fields = {"learner": member.learner, "incarnation": member.incarnation}
        machine.note("first_merge", **fields, fragment=result.fragment)


def _merge_fields(machine: Machine, round_: Round, result: MergeResult, now: float) -> dict[str, Any]:
    closed_at = now if round_.closed_at is None else round_.closed_at
    quorum_at = closed_at if round_.quorum_at is None else round_.quorum_at
    return {
        "round": round_.id,
        "fragment": result.fragment,
        "version": result.version,
        "clock": result.clock,
        "live": len(round_.asked),
        "missing": sorted(set(round_.asked) - set(round_.answers)),
        "wait_quorum_s": quorum_at - round_.opened_at,
        "wait_grace_s": closed_at - quorum_at,
        "merge_s": now - closed_at,
        "digest": result.digest,
        "share": result.share,
        "contains": [asdict(contained) for contained in result.contains],
        "tokens": machine.books.tokens,
        "final": round_.final,
        "skipped_slots": machine.skipped_slots,
    }


def publish_failed(machine: Machine, job: MergeJob, error: str, now: float) -> None:
    """The journal could not take a version: merges pause, and this one is tried again."""
    round_ = machine.rounds.get(job.fragment.index)
    if round_ is None or round_.id != job.round:
        return
    round_.retry_at = now + machine.settings.journal_retry_s
    machine.note("journal_failed", fragment=job.fragment.index, round=job.round, error=error)
