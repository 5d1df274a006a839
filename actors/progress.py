"""What the driver shows: statuses and tape events as views and lines for people."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Any

from actors.spec import SYNCER, RunSpec
from actors.supervisor_status import SupervisorStatus
from app.diloco.handing_in import LEFT
from app.run import tape
from app.run.display import LearnerRow, RunView
from app.run.final_report import Ending
from app.run.history import History
from app.run.remote import patiently

SPEED_WINDOW_S = 15.0
TAPE_S = 60.0
"""Seconds for which the last report waits for a store that is away."""
AWAY_S = 2.0
"""A syncer that has not answered for longer is shown as away."""


class Progress:
    """Remembers enough to tell speeds and what is new."""

    def __init__(self, spec: RunSpec, attached: bool):
        """`attached`: the run lived before this driver; otherwise its actors start for the first time."""
        self._spec = spec
        self._started = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque()
        self._news = News(tape.Follower(spec.tape), attached, spec.config.learner_ids)

    def view(self, status: SupervisorStatus) -> RunView:
        """The run as the terminal shows it."""
        syncer = status.syncer
        tokens = syncer.tokens if syncer else 0
        return RunView(
            rows=tuple(self._row(learner, status) for learner in status.present),
            tokens=tokens,
            budget=self._spec.config.train.tokens,
            tokens_per_s=self._speed(tokens) if syncer else 0.0,
            elapsed_s=time.monotonic() - self._started,
            merges=sum(syncer.versions) if syncer else 0,
            live=syncer.live if syncer else 0,
            quorum=self._spec.config.diloco.min_quorum,
            eval_loss=status.evaluation.result.loss if status.evaluation else None,
            syncer=self._syncer_state(status),
        )

    def _row(self, learner: str, status: SupervisorStatus) -> LearnerRow:
        seen, syncer = status.learners.get(learner), status.syncer
        member = syncer.members.get(learner, {}) if syncer else {}
        state = "starting" if seen is None else seen.state
        if learner in status.silent and seen is not None:
            state = "silent"
        step_time = seen.step_time if seen else 0.0
        pool = self._spec.config.pool_of(learner)
        samples = pool.train.batch_size * pool.train.accumulation * pool.settings.workers_per_learner
        tokens_per_step = samples * self._spec.config.data.seq_len
        return LearnerRow(
            learner=learner,
            pool=pool.name,
            state=state,
            step=seen.steps if seen else 0,
            tokens_per_s=tokens_per_step / step_time if step_time and state == "training" else 0.0,
            loss=seen.loss if seen and seen.steps else None,
            last_merge_s=member.get("merged_s_ago"),
            incarnation=seen.incarnation if seen else 0,
        )

    def _speed(self, tokens: int) -> float:
        now = time.monotonic()
        self._counts.append((now, tokens))
        while now - self._counts[0][0] > SPEED_WINDOW_S:
            self._counts.popleft()
        (then, before), elapsed = self._counts[0], now - self._counts[0][0]
        return max(0.0, (tokens - before) / (now - then)) if elapsed > 0 else 0.0

    def _syncer_state(self, status: SupervisorStatus) -> str:
        syncer = status.syncer
        if status.phase == "done":
            return "done"
        if status.phase == "ending":
            full = syncer is not None and syncer.ended == "budget"
            return "evaluating and writing the model" if full else "writing the checkpoint"
        if syncer is None:
            return "starting"
        if status.syncer_silent_s > AWAY_S:
            return "away"
        if syncer.paused:
            return "paused" if self._news.joined else "waiting for learners"
        return "last round" if syncer.finishing else "merging"

    def news(self, status: SupervisorStatus) -> list[str]:
        """Lines about faults and recoveries since the last call."""
        lines = self._news.fresh()
        self._news.joined |= any(learner.incarnation > 0 for learner in status.learners.values())
        return lines


class News:
    """Tells what went wrong and what is well again, out of the tape; a start alone is neither."""

    def __init__(self, follower: tape.Follower, attached: bool, first: Collection[str]):
        """`attached`: everybody has started before; otherwise the first start of each is told by nobody.

        `first`: the learners that the run starts with.
        """
        self._tape, self._first = follower, frozenset(first)
        self._attached = attached
        self._started: set[str] = set()
        self._paused = False
        self.joined = False
        """Somebody has joined since this driver looks: before, merges have nothing to wait for but the start."""

    def fresh(self) -> list[str]:
        """Lines about the events since the last call."""
        return [line for event in self._tape.fresh() if (line := self._line(event)) is not None]

    def _line(self, event: dict[str, Any]) -> str | None:
        match event["kind"]:
            case "fault":
                return f"fault: {event['fault']} of {event['target']} (pid {event.get('pid', '?')})"
            case "leaving":
                return f"{event['learner']} has to go, {event['reason']}: it has {event['seconds']:.0f} s to hand in"
            case "leave" if event["reason"] == LEFT:
                return f"{event['learner']} #{event['incarnation']} has handed in and left"
            case "leave":
                return f"{event['learner']} #{event['incarnation']} is gone: {event['reason']}"
            case "scaled":
                return f"pool {event['pool']} may have {event['most']} learners from now on"
            case "join":
                self.joined = True
                if event["learner"] not in self._first and event["learner"] not in self._started:
                    self._started.add(event["learner"])
                    return f"{event['learner']} has joined"
                back = self._is_back(event["learner"], first=event["incarnation"] == 1)
                return f"{event['learner']} is back as incarnation {event['incarnation']}" if back else None
            case "syncer_started":
                back = self._is_back(SYNCER, first=False)
                return f"the syncer is back under epoch {event['epoch']}" if back else None
            case "paused" if self.joined:
                self._paused = True
                return f"merges paused ({event['live']} live)"
            case "resumed" if self._paused:
                self._paused = False
                return f"merges resumed ({event['live']} live)"
            case "journal_failed":
                return f"the journal can't be written, merges wait: {event['error']}"
            case _:
                return None

    def _is_back(self, who: str, first: bool) -> bool:
        """Whether this start is one after another; `first`: it is known to be the very first."""
        back = not first and (self._attached or who in self._started)
        self._started.add(who)
        return back


def _events(spec: RunSpec) -> list[dict[str, Any]]:
    try:
        return patiently(lambda: tape.read(spec.tape), TAPE_S)[0]
    except OSError:
        return []  # the run has ended well without them


def ending_of(spec: RunSpec, status: SupervisorStatus) -> Ending:
    """The result for people."""
    summary, final = status.summary, status.final
    assert summary is not None  # the caller looked
    return Ending(
        status=summary["status"],
        tokens=summary["tokens_processed"],
        wall_s=summary["wall_s"],
        merges=summary["merges"],
        eval_loss_first=summary["eval_loss_first"],
        eval_loss_final=summary["eval_loss_final"],
        bits_per_byte=summary["eval_bits_per_byte"],
        gzip_bits_per_byte=final.gzip_bits_per_byte if final else None,
        recoveries=History(_events(spec)).recoveries(),
        sample=final.sample if final else None,
        folder=spec.location,
    )
