"""The end of a run: the final evaluation, and `summary.json` from it, the tape and the syncer's last word."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from actors.evaluator import FinalResult
from actors.fleet import Fleet
from actors.lookout import Lookout
from actors.spec import EVALUATOR, RunSpec
from actors.syncer_status import SyncerStatus
from app.diloco.accounts import Balance
from app.run import tape
from app.run.attempts import without_pauses
from app.run.facts import ByteFacts, EvalFacts, RunFacts
from app.run.history import History
from app.run.remote import patiently
from app.run.storage import open_store
from app.run.summary import SummaryDamaged, read_summary, run_versions, summarise, write_summary

_log = logging.getLogger(__name__)


def final_evaluation(
    spec: RunSpec, fleet: Fleet, lookout: Lookout, watch: Callable[[], None], stopped: Callable[[], bool]
) -> FinalResult | None:
    """Have the global model measured and written; an evaluator that dies or hangs (`watch` ends it) is made again.

    Returns None when the run is stopped meanwhile. Raises RayError or TimeoutError of the last of `final_tries` tries.
    """
    for left in reversed(range(spec.config.supervisor.final_tries)):
        try:
            return _try_to_finish(spec, fleet, lookout, watch, stopped)
        except (RayError, TimeoutError) as error:
            _log.warning("final evaluation failed: %s", error)
            if not left:
                raise
    return None


def _try_to_finish(
    spec: RunSpec, fleet: Fleet, lookout: Lookout, watch: Callable[[], None], stopped: Callable[[], bool]
) -> FinalResult | None:
    config = spec.config.supervisor
    work = None
    deadline = time.monotonic() + config.evaluation_deadline_s
    while not stopped():
        if EVALUATOR in lookout.missing:
            fleet.evaluator()
        lookout.look(wait_s=config.poll_s)
        watch()
        if (error := lookout.errors.pop(EVALUATOR, None)) is not None:
            raise RayError(error)
        if work is None and lookout.well(EVALUATOR):  # calls of one that is being restarted are lost
            work = fleet.evaluator().finish.remote()
        if work is not None and ray.wait([work], timeout=config.poll_s)[0]:
            final: FinalResult = ray.get(work)
            return final
        if time.monotonic() > deadline:
            ray.kill(fleet.evaluator(), no_restart=False)
            raise TimeoutError(f"not done after {config.evaluation_deadline_s:g} s")
    return None


def conclude(spec: RunSpec, status: str, syncer: SyncerStatus | None, final: FinalResult | None) -> dict[str, Any]:
    """Build the summary and put it into the run folder.

    An attempt whose syncer never answered has done nothing: the summary of the attempt before it stays.
    """
    patience_s = patience_of(spec, status)
    if syncer is None and (before := _summary_before(spec, patience_s)) is not None:
        return {**before, "status": status}
    history = History(without_pauses(patiently(lambda: tape.read(spec.tape), patience_s)[0]))
    totals = syncer.totals if syncer is not None else {}
    balance = syncer.balance if syncer is not None else _nothing(spec)
    facts = RunFacts(
        status=status,
        tokens_budget=spec.config.train.tokens,
        balance=Balance(**balance),
        versions_made=syncer.merges if syncer is not None else 0,
        merges=history.merges(),
        global_step=syncer.clock if syncer is not None else 0,
        evals=() if final is None else _evals(final),
        started_at=history.started_at,
        samples=history.samples(),
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
    patiently(lambda: write_summary(open_store(spec.location), summary), patience_s)
    return summary


def patience_of(spec: RunSpec, status: str) -> float:
    """Seconds for which the last files wait for a store that is away. Who stops a run does not wait long."""
    config = spec.config.supervisor
    return config.evaluation_deadline_s if status == "completed" else config.stop_deadline_s


def _summary_before(spec: RunSpec, patience_s: float) -> dict[str, Any] | None:
    try:
        return patiently(lambda: read_summary(open_store(spec.location)), patience_s)
    except (FileNotFoundError, SummaryDamaged):
        return None


def _evals(final: FinalResult) -> tuple[EvalFacts, EvalFacts]:
    last = final.last
    return (
        EvalFacts(0, final.first.loss, final.first.bits_per_byte),
        EvalFacts(last.tokens, last.result.loss, last.result.bits_per_byte),
    )


def _nothing(spec: RunSpec) -> dict[str, Any]:
    return {"parameters": spec.layout.numel, "processed": 0, "merged": 0, "discarded": {}, "outstanding": 0}
