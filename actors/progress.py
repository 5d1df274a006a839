"""What the driver shows: statuses and tape events as views and lines for people."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from actors.spec import RunSpec
from actors.supervisor import SupervisorStatus
from app.run import tape
from app.run.display import LearnerRow, RunView
from app.run.final_report import Ending
from app.run.history import History

SPEED_WINDOW_S = 15.0


class Progress:
    """Remembers enough to tell speeds and what is new."""

    def __init__(self, spec: RunSpec):
        self._spec = spec
        self._started = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque()
        self._tape = tape.Follower(spec.tape)

    def view(self, status: SupervisorStatus) -> RunView:
        """The run as the terminal shows it."""
        syncer = status.syncer
        tokens = syncer.tokens if syncer else 0
        return RunView(
            rows=tuple(self._row(learner, status) for learner in self._spec.config.learner_ids),
            tokens=tokens,
            budget=self._spec.config.train.tokens,
            tokens_per_s=self._speed(tokens),
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
        tokens_per_step = pool.train.batch_size * pool.train.accumulation * self._spec.config.data.seq_len
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
        if status.syncer is None:
            return "starting"
        if status.phase in ("ending", "done"):
            return "evaluating and writing the model" if status.phase == "ending" else "done"
        if status.syncer_silent_s > 2.0:
            return "away"
        if status.syncer.paused:
            return "paused"
        return "last round" if status.syncer.finishing else "merging"

    def news(self) -> list[str]:
        """Lines about faults and recoveries since the last call."""
        return [line for event in self._tape.fresh() if (line := _line(event)) is not None]


def _line(event: dict[str, Any]) -> str | None:
    match event["kind"]:
        case "fault":
            return f"fault: {event['fault']} of {event['target']} (pid {event.get('pid', '?')})"
        case "leave":
            return f"{event['learner']} #{event['incarnation']} has left: {event['reason']}"
        case "join" if event["incarnation"] > 1:
            return f"{event['learner']} is back as incarnation {event['incarnation']}"
        case "syncer_started" if event["epoch"] > 2:
            return f"the syncer is back under epoch {event['epoch']}"
        case "paused" | "resumed":
            return f"merges {event['kind']} ({event['live']} live)"
        case "journal_failed":
            return f"the journal can't be written, merges wait: {event['error']}"
        case _:
            return None


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
        recoveries=History(tape.read(spec.tape)[0]).recoveries(),
        sample=final.sample if final else None,
        folder=str(spec.run_dir),
    )
