"""What the driver makes of statuses and events, without a cluster."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors import progress as module
from actors.learner import LearnerStatus
from actors.progress import Progress
from actors.spec import RunSpec
from actors.supervisor_status import SupervisorStatus
from actors.syncer_status import SyncerStatus
from app.config import Config, DataConfig, PoolConfig, TrainConfig
from app.diloco.fragments import TensorSpec, build_layout


def spec(folder: Path) -> RunSpec:
    config = Config(
        learners=2,
        train=TrainConfig(tokens=1000, batch_size=4, accumulation=2),
        data=DataConfig(seq_len=8),
    )
    layout = build_layout([TensorSpec("w", (4,), embedding_like=False)], 1)
    return RunSpec("run", config, str(folder), layout, samples=100)


def learner(**fields: Any) -> LearnerStatus:
    known: dict[str, Any] = {
        "learner": "learner-0",
        "incarnation": 1,
        "pid": 7,
        "node_id": "n",
        "state": "training",
        "steps": 5,
        "stepped_at": 1.0,
        "tokens": 320,
        "step_time": 0.5,
        "loss": 2.0,
        "error": None,
    }
    return LearnerStatus(**(known | fields))


def syncer(**fields: Any) -> SyncerStatus:
    known: dict[str, Any] = {
        "epoch": 2,
        "pid": 8,
        "node_id": "n",
        "clock": 5,
        "tokens": 320,
        "merges": 3,
        "versions": (1, 2),
        "live": 1,
        "contributors": 1,
        "paused": False,
        "finishing": None,
        "ended": None,
        "balance": {},
        "work_exact": True,
        "refusals": {},
        "traffic": {},
        "cpu_s": 0.1,
        "merge_s": 0.1,
        "members": {"learner-0": {"merged_s_ago": 1.5}},
    }
    return SyncerStatus(**(known | fields))


def status(**fields: Any) -> SupervisorStatus:
    known: dict[str, Any] = {
        "attempt": "a",
        "phase": "running",
        "syncer": syncer(),
        "syncer_silent_s": 0.0,
        "learners": {"learner-0": learner()},
        "silent": (),
        "present": ("learner-0", "learner-1"),
        "evaluation": None,
        "final": None,
        "summary": None,
        "error": None,
    }
    return SupervisorStatus(**(known | fields))


def test_the_view_of_a_run(tmp_path: Path) -> None:
    view = Progress(spec(tmp_path), attached=False).view(status())
    assert (view.tokens, view.budget, view.merges, view.live, view.quorum) == (320, 1000, 3, 1, 1)
    first, second = view.rows
    assert (first.state, first.step, first.loss, first.last_merge_s) == ("training", 5, 2.0, 1.5)
    assert first.tokens_per_s == 4 * 2 * 8 / 0.5
    assert (second.learner, second.state, second.step, second.loss) == ("learner-1", "starting", 0, None)


def test_each_learner_is_shown_with_its_pool_and_its_pools_batch(tmp_path: Path) -> None:
    run = spec(tmp_path)
    pools = {"fast": PoolConfig(min_learners=1), "slow": PoolConfig(batch_size=1, accumulation=3)}
    run = replace(run, config=replace(run.config, pools=pools))
    both = {name: learner(learner=name) for name in run.config.learner_ids}
    fast, slow = Progress(run, attached=False).view(status(learners=both)).rows
    assert (fast.pool, fast.tokens_per_s) == ("fast", 4 * 2 * 8 / 0.5)
    assert (slow.pool, slow.tokens_per_s) == ("slow", 1 * 3 * 8 / 0.5)


def test_a_run_of_which_nothing_is_known_yet(tmp_path: Path) -> None:
    view = Progress(spec(tmp_path), attached=False).view(status(phase="starting", syncer=None, learners={}))
    assert (view.tokens, view.merges, view.live, view.syncer) == (0, 0, 0, "starting")
    assert [row.state for row in view.rows] == ["starting", "starting"]


def test_only_a_training_learner_has_a_speed(tmp_path: Path) -> None:
    progress = Progress(spec(tmp_path), attached=False)
    (silent, _) = progress.view(status(silent=("learner-0",))).rows
    assert (silent.state, silent.tokens_per_s) == ("silent", 0.0)
    (resting, _) = progress.view(status(learners={"learner-0": learner(state="finished")})).rows
    assert resting.tokens_per_s == 0.0
    (new, _) = progress.view(status(learners={"learner-0": learner(steps=0, step_time=0.0)})).rows
    assert (new.tokens_per_s, new.loss) == (0.0, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "merging"),
        ({"syncer_silent_s": 3.0}, "away"),
        ({"syncer": syncer(paused=True)}, "paused"),
        ({"syncer": syncer(finishing="budget")}, "last round"),
        ({"phase": "ending", "syncer": syncer(ended="budget")}, "evaluating and writing the model"),
        ({"phase": "ending", "syncer": syncer(ended="SIGTERM")}, "writing the checkpoint"),
        ({"phase": "ending", "syncer": None}, "writing the checkpoint"),
        ({"phase": "done", "syncer_silent_s": 9.0}, "done"),
    ],
)
def test_the_state_of_the_syncer(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    progress = Progress(spec(tmp_path), attached=False)
    progress.news(status())
    assert progress.view(status(**fields)).syncer == expected


def test_the_speed_is_that_of_the_last_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    progress = Progress(spec(tmp_path), attached=False)
    speeds = []
    for tokens in (0, 100, 200, 200, 200, 200):
        speeds.append(progress.view(status(syncer=syncer(tokens=tokens))).tokens_per_s)
        now += 5.0
    assert speeds == pytest.approx([0.0, 20.0, 20.0, 200 / 15, 100 / 15, 0.0])


def test_the_speed_is_never_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A syncer that came back may know a little less than the one before told."""
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    progress = Progress(spec(tmp_path), attached=False)
    progress.view(status(syncer=syncer(tokens=300)))
    now += 1.0
    assert progress.view(status(syncer=syncer(tokens=250))).tokens_per_s == 0.0


def test_on_resume_the_tokens_of_before_are_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    progress = Progress(spec(tmp_path), attached=False)
    views = []
    for known in (None, syncer(tokens=800), syncer(tokens=810)):
        views.append(progress.view(status(syncer=known)))
        now += 5.0
    assert [view.tokens_per_s for view in views] == [0.0, 0.0, 2.0]
    assert [view.eta_s for view in views] == [None, None, 95.0]


def test_nobody_is_paused_before_anybody_has_joined(tmp_path: Path) -> None:
    progress = Progress(spec(tmp_path), attached=False)
    alone = status(syncer=syncer(paused=True, live=0), learners={"learner-0": learner(incarnation=0)})
    progress.news(alone)
    assert progress.view(alone).syncer == "waiting for learners"
    joined = status(syncer=syncer(paused=True, live=0))
    progress.news(joined)
    assert progress.view(joined).syncer == "paused"


def tell(run: RunSpec, *events: dict[str, Any]) -> None:
    with Path(run.tape).open("a") as file:
        file.writelines(json.dumps({"at": 1.0, **event}) + "\n" for event in events)


def join(name: str, incarnation: int) -> dict[str, Any]:
    return {"kind": "join", "learner": name, "incarnation": incarnation}


def test_a_start_on_an_old_tape_is_no_news(tmp_path: Path) -> None:
    run = spec(tmp_path)
    tell(run, join("learner-0", 1), {"kind": "syncer_started", "epoch": 2})
    progress = Progress(run, attached=False)
    tell(
        run,
        {"kind": "syncer_started", "epoch": 4},
        {"kind": "paused", "live": 0},
        join("learner-0", 2),
        {"kind": "resumed", "live": 1},
        join("learner-1", 1),
    )
    assert progress.news(status()) == []
    tell(
        run,
        {"kind": "syncer_started", "epoch": 5},
        {"kind": "paused", "live": 0},
        join("learner-1", 2),
        {"kind": "resumed", "live": 2},
    )
    assert progress.news(status()) == [
        "the syncer is back under epoch 5",
        "merges paused (0 live)",
        "learner-1 is back as incarnation 2",
        "merges resumed (2 live)",
    ]


def test_whoever_attaches_knows_that_all_have_started(tmp_path: Path) -> None:
    run = spec(tmp_path)
    progress = Progress(run, attached=True)
    progress.news(status())
    tell(
        run,
        {"kind": "paused", "live": 0},
        {"kind": "syncer_started", "epoch": 3},
        join("learner-0", 2),
        join("learner-1", 1),
    )
    assert progress.news(status()) == [
        "merges paused (0 live)",
        "the syncer is back under epoch 3",
        "learner-0 is back as incarnation 2",
    ]


def test_news_are_told_once(tmp_path: Path) -> None:
    run = spec(tmp_path)
    assert Progress(run, attached=False).news(status()) == []  # no tape yet
    old = [{"kind": "leave", "at": 1.0, "learner": "learner-0", "incarnation": 1, "reason": "died"}]
    Path(run.tape).write_text("".join(json.dumps(event) + "\n" for event in old))
    progress = Progress(run, attached=False)
    assert progress.news(status()) == []  # of before this driver
    new = [
        {"kind": "fault", "at": 2.0, "fault": "kill", "target": "learner-1", "pid": 77},
        {"kind": "fault", "at": 2.0, "fault": "died", "target": "learner-0"},
        {"kind": "merge", "at": 2.1},
        {"kind": "join", "at": 3.0, "learner": "learner-0", "incarnation": 1},
        {"kind": "join", "at": 3.0, "learner": "learner-1", "incarnation": 1},
        {"kind": "join", "at": 3.5, "learner": "learner-1", "incarnation": 2},
        {"kind": "syncer_started", "at": 4.0, "epoch": 2},
        {"kind": "syncer_started", "at": 5.0, "epoch": 3},
        {"kind": "paused", "at": 6.0, "live": 1},
        {"kind": "journal_failed", "at": 7.0, "error": "disk full"},
    ]
    with Path(run.tape).open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in new)
    assert progress.news(status()) == [
        "fault: kill of learner-1 (pid 77)",
        "fault: died of learner-0 (pid ?)",
        "learner-1 is back as incarnation 2",
        "the syncer is back under epoch 3",
        "merges paused (1 live)",
        "the journal can't be written, merges wait: disk full",
    ]
    assert progress.news(status()) == []


def test_learners_come_and_go_in_the_view_and_in_the_news(tmp_path: Path) -> None:
    """A row for each that has a place or is wanted from the start, and a line for each of a pool's further ones."""
    run = spec(tmp_path)
    present = ("learner-1", "local-0")
    view = Progress(run, attached=False).view(status(present=present, learners={"local-0": learner(learner="local-0")}))
    assert [(row.learner, row.state) for row in view.rows] == [("learner-1", "starting"), ("local-0", "training")]
    progress = Progress(run, attached=False)
    events = [
        {"kind": "join", "at": 3.0, "learner": "local-0", "incarnation": 1},
        {"kind": "join", "at": 3.5, "learner": "local-0", "incarnation": 2},
        {"kind": "scaled", "at": 4.0, "pool": "local", "most": 1},
        {"kind": "leaving", "at": 5.0, "learner": "local-0", "reason": "its node goes", "seconds": 18.0},
        {"kind": "leave", "at": 6.0, "learner": "local-0", "incarnation": 2, "reason": "left"},
        {"kind": "leave", "at": 7.0, "learner": "learner-1", "incarnation": 1, "reason": "died"},
    ]
    Path(run.tape).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert progress.news(status()) == [
        "local-0 has joined",
        "local-0 is back as incarnation 2",
        "pool local may have 1 learners from now on",
        "local-0 has to go, its node goes: it has 18 s to hand in",
        "local-0 #2 has handed in and left",
        "learner-1 #1 is gone: died",
    ]
