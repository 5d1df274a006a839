"""Runs on a stream of text: its rows come from the ledger."""

import json

import pytest

from actors.ledger import STATE
from actors.spec import LEDGER, SUPERVISOR
from tests.cluster.audit import assert_every_sample_has_one_place
from tests.cluster.harness import kill, wait_for


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"text": f"{part} {i} " + "to be or not to be. " * 8}) for i in range(60)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    return folder


def streaming(folder):
    return (
        "data.source=files",
        f"data.path={folder}",
        "data.streaming=true",
        "data.max_bytes=null",
        "data.heldout_share=0.1",
        "data.stream_head=60",
    )


def test_a_stream_goes_on_after_deaths_and_no_sample_is_lost_or_used_twice(start, texts):
    run = start(*streaming(texts))
    run.wait_training()
    kill(run.learner("learner-0").pid)
    pid = run.call(LEDGER, "pid")
    kill(pid)
    wait_for("another ledger answers", lambda: (new := run.try_call(LEDGER, "pid")) and new != pid)
    run.wait_training()
    state = run.spec.work_dir / "checkpoints" / STATE
    wait_for("it is in the third epoch", lambda: json.loads(state.read_text())["stream"]["next"]["epoch"] >= 2)
    summary = run.finish()
    assert_every_sample_has_one_place(run, summary)
    assert summary["work"]["balanced"]


def test_text_that_shows_to_be_unusable_ends_the_run_with_its_name(start, texts):
    with (texts / "2.jsonl").open("a") as file:
        file.write('\n{"texd": "?"}')
    run = start(*streaming(texts))
    error = wait_for("the run has failed", lambda: (s := run.status(SUPERVISOR)) and s.error)
    assert f"data.path={texts / '2.jsonl'} is refused: no text in the field 'text'" in error
    assert run.wait_done()["status"] == "failed"
