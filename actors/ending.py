"""Writes `summary.json` from the tape, the syncer's last word and the final evaluation."""

from __future__ import annotations

from typing import Any

from actors.evaluator import FinalResult
from actors.spec import RunSpec
from actors.syncer_status import SyncerStatus
from app.diloco.accounts import Balance
from app.run import tape
from app.run.attempts import without_pauses
from app.run.facts import ByteFacts, EvalFacts, RunFacts
from app.run.history import History
from app.run.storage import open_store
from app.run.summary import run_versions, summarise, write_summary


def conclude(spec: RunSpec, status: str, syncer: SyncerStatus | None, final: FinalResult | None) -> dict[str, Any]:
    """Build the summary and put it into the run folder."""
    history = History(without_pauses(tape.read(spec.tape)[0]))
    totals = syncer.totals if syncer is not None else {}
    balance = syncer.balance if syncer is not None else _nothing(spec)
    facts = RunFacts(
        status=status,
        tokens_budget=spec.config.train.tokens,
        balance=Balance(**balance),
        merges=history.merges(),
        global_step=syncer.clock if syncer is not None else 0,
        evals=() if final is None else _evals(final),
        started_at=history.started_at,
        first_step_at=history.first_step_at(),
        budget_at=history.budget_at(),
        ended_at=history.ended_at,
        learners={name: history.learner(name, totals.get(name, (0, 0))) for name in history.learners()},
        syncer=history.syncer(),
        bytes=ByteFacts(**{what: history.traffic(what) for what in ("up", "down", "up_fp32", "down_fp32")}),
        faults=history.faults(),
        versions=run_versions(),
    )
    summary = summarise(facts)
    write_summary(open_store(str(spec.run_dir)), summary)
    return summary


def _evals(final: FinalResult) -> tuple[EvalFacts, EvalFacts]:
    last = final.last
    return (
        EvalFacts(0, final.first.loss, final.first.bits_per_byte),
        EvalFacts(last.tokens, last.result.loss, last.result.bits_per_byte),
    )


def _nothing(spec: RunSpec) -> dict[str, Any]:
    return {"parameters": spec.layout.numel, "processed": 0, "merged": 0, "discarded": {}, "outstanding": 0}
