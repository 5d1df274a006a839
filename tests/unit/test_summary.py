"""The figures of a run against cases worked out by hand, and the keys of summary.json."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from app.diloco.accounts import Balance
from app.run.facts import ByteFacts, EvalFacts, FaultFacts, LearnerFacts, MergeFacts, RunFacts, SyncerFacts
from app.run.figures import data_parallel_bytes, goodput, max_gap, participation, tokens_by_fate, uptime
from app.run.storage import LocalStore
from app.run.summary import read_summary, run_versions, summarise, write_summary

KEYS = """status tokens_budget tokens_processed tokens_merged tokens_discarded merges global_step eval_loss_first
eval_loss_final eval_bits_per_byte wall_s goodput uptime participation max_merge_gap_s learners syncer bytes faults
samples versions work"""


def facts() -> RunFacts:
    learner = LearnerFacts("local", 1, 10, 800, 8.0, 12.0, ((100.0, 110.0),), ())
    other = LearnerFacts("local", 2, 5, 400, 4.0, 12.0, ((104.0, 106.0), (109.0, 118.0)), (3.5,))
    return RunFacts(
        status="completed",
        tokens_budget=1000,
        balance=Balance(10, 12_000, 9_000, {"overwritten": 2_000, "died": 500}, 500),
        versions_made=4,  # the tape lacks one
        merges=(MergeFacts(103.0, 2, 2), MergeFacts(105.0, 1, 2), MergeFacts(112.0, 1, 1)),
        global_step=10,
        evals=(EvalFacts(0, 7.0, 4.0), EvalFacts(1200, 3.0, 1.8)),
        started_at=90.0,
        samples={"issued": 64, "used": 50, "leased": 0, "returned": 14, "reissued": 4},
        first_step_at=100.0,
        budget_at=120.0,
        ended_at=125.0,
        learners={"learner-1": other, "learner-0": learner},
        syncer=SyncerFacts(1, 2.0, 0.5, ()),
        bytes=ByteFacts(10, 20, 30, 40),
        faults=(FaultFacts("kill", "learner-1", 16.0, 3.5),),
        versions={"python": "3.11"},
    )


def test_participation_is_the_mean_of_the_shares() -> None:
    assert participation(facts().merges) == pytest.approx((1.0 + 0.5 + 1.0) / 3)
    assert participation([]) is None


def test_max_gap() -> None:
    assert max_gap([5.0, 1.0, 2.0, 9.5]) == 4.5
    assert max_gap([1.0]) is None
    assert max_gap([]) is None


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(0.0, 10.0)], 1.0),
        ([(-5.0, 4.0), (2.0, 6.0), (3.0, 5.0)], 0.6),
        ([(8.0, 20.0), (1.0, 2.0)], 0.3),
        ([(11.0, 20.0), (-3.0, -1.0)], 0.0),
        ([(2.0, 2.0), (4.0, 3.0)], 0.0),
    ],
)
def test_uptime_is_the_covered_share(intervals: list[tuple[float, float]], expected: float) -> None:
    assert uptime(intervals, 0.0, 10.0) == pytest.approx(expected)


def test_uptime_of_no_time_is_unknown() -> None:
    assert uptime([(0.0, 1.0)], 5.0, 5.0) is None


def test_goodput() -> None:
    assert goodput(12.0, 0.75, 24.0) == pytest.approx(0.375)
    assert goodput(0.0, 0.0, 0.0) is None


def test_data_parallel_bytes_against_a_ring_worked_out_by_hand() -> None:
    """4 workers, 100 parameters, 3 steps each: each sends 2 · 3/4 · 200 bytes = 300 bytes a step."""
    assert data_parallel_bytes(100, 4, 12) == 4 * 3 * 300
    assert data_parallel_bytes(100, 1, 12) == 0


def test_tokens_of_all_fates_add_up_exactly() -> None:
    balance = Balance(3, 30, 10, {"overwritten": 10, "died": 5}, 5)
    assert balance.exact
    tokens = tokens_by_fate(balance)
    assert sum(tokens.values()) == 10
    assert tokens == {"died": 2, "merged": 3, "outstanding": 2, "overwritten": 3}


def test_the_summary_has_the_keys_and_values_of_the_contract() -> None:
    summary = summarise(facts())
    assert list(summary) == KEYS.split()
    assert summary["tokens_processed"] == 1200
    assert summary["tokens_merged"] == 900
    assert summary["tokens_discarded"] == {"died": 50, "overwritten": 200}
    assert (summary["merges"], summary["global_step"]) == (4, 10)
    assert (summary["eval_loss_first"], summary["eval_loss_final"]) == (7.0, 3.0)
    assert summary["eval_bits_per_byte"] == 1.8
    assert summary["wall_s"] == 35.0
    assert summary["goodput"] == pytest.approx(12.0 * 0.75 / 24.0)
    assert summary["uptime"] == pytest.approx(0.9)
    assert summary["max_merge_gap_s"] == 7.0
    assert list(summary["learners"]) == ["learner-0", "learner-1"]
    assert summary["learners"]["learner-1"] == {
        "pool": "local",
        "incarnations": 2,
        "steps": 5,
        "tokens": 400,
        "tokens_per_s": 100.0,
        "recoveries_s": [3.5],
    }
    assert summary["syncer"] == {"incarnations": 1, "cpu_s": 2.0, "merge_s": 0.5, "recoveries_s": []}
    assert summary["bytes"] == {
        "up": 10,
        "down": 20,
        "up_fp32": 30,
        "down_fp32": 40,
        "data_parallel": 4 * 10 * 15 // 2,
    }
    assert summary["faults"] == [{"kind": "kill", "target": "learner-1", "at_s": 16.0, "recovered_s": 3.5}]
    assert summary["work"] == {
        "parameters": 10,
        "processed": 12_000,
        "merged": 9_000,
        "discarded": {"died": 500, "overwritten": 2_000},
        "outstanding": 500,
        "balanced": True,
    }


def test_work_that_does_not_add_up_is_shown() -> None:
    wrong = dataclasses.replace(facts(), balance=Balance(10, 12_000, 9_000, {}, 500))
    assert summarise(wrong)["work"]["balanced"] is False


def test_a_run_that_never_began_has_a_summary() -> None:
    empty = RunFacts(
        "failed", 1000, Balance(10, 0, 0, {}, 0), 0, (), 0, (), 1.0, None, None, None, 2.0, {},
        SyncerFacts(0, 0.0, 0.0, ()), ByteFacts(0, 0, 0, 0), (), {},
    )  # fmt: skip
    summary = summarise(empty)
    assert summary["goodput"] is None
    assert summary["uptime"] is None
    assert summary["participation"] is None
    assert summary["eval_loss_final"] is None
    json.dumps(summary, allow_nan=False)


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="completed"):
        summarise(dataclasses.replace(facts(), status="great"))


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_summary(store)
    write_summary(store, summarise(facts()))
    before = read_summary(store)
    assert before == summarise(facts())
    with pytest.raises(TypeError):
        write_summary(store, {"loss": object()})
    assert read_summary(store) == before


def test_the_loss_of_a_model_that_diverged_is_null(tmp_path: Path) -> None:
    diverged = dataclasses.replace(facts(), evals=(EvalFacts(0, 7.0, 4.0), EvalFacts(9, math.nan, math.inf)))
    write_summary(LocalStore(tmp_path), summarise(diverged))
    read = read_summary(LocalStore(tmp_path))
    assert (read["eval_loss_first"], read["eval_loss_final"], read["eval_bits_per_byte"]) == (7.0, None, None)


def test_versions_name_what_a_result_depends_on() -> None:
    import torch

    versions = run_versions()
    assert versions["torch"] == torch.__version__
    assert {"python", "ray", "transformers", "numpy"} <= set(versions)
