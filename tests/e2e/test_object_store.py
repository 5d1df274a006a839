"""A run whose folder is in an object store: a real S3 server on loopback, real kills, a real outage."""

import json
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fsspec
import psutil
import pytest
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.replay import main as replay
from app.run import tape
from app.run.lines import parsed
from app.run.mirror import COMPLETE, is_complete
from app.run.storage import open_store
from below import below, gone
from tests.cluster.harness import wait_for
from tests.e2e.conftest import ROOT, TWO, clean_env
from tests.s3 import BUCKET, serving

pytestmark = pytest.mark.timeout(400)

WAIT_S = 150.0
POLL_S = 0.5
"""Looks at the tape are few, as each is work for the server, which lives in this process."""


@pytest.fixture
def s3():
    with serving() as server:
        yield server


class Run:
    """`python -m app.train run.dir=s3://...` in the background; all it has of this machine is a cache of its own."""

    def __init__(self, url: str, cwd: Path, env: dict[str, str], *overrides: str):
        cwd.mkdir()
        self.url = url
        self.log = cwd / "log"
        keys = [*TWO, f"run.dir={url}", f"run.cache_dir={cwd / 'cache'}", *overrides]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.train", *keys],
                cwd=cwd,
                env={**clean_env(), **env, "PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> int:
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log.read_text()) from None

    def wait_merges(self, count: int) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(POLL_S)
            return len(self.events("merge")) >= count

        wait_for(f"{count} merges", look, WAIT_S)

    def events(self, kind: str) -> list[dict]:
        return [event for event in tape.read(f"{self.url}/events.jsonl")[0] if event["kind"] == kind]

    def waiting(self, kind: str, since: float) -> list[dict]:
        """Events of this time on the syncer's machine, where they wait for the store."""
        found = [parsed(path.read_bytes())[0] for path in sorted(self.log.parent.glob("cache/*/spool/*/*.spool"))]
        return [event for events in found for event in events if event["kind"] == kind and event["at"] > since]

    def steps(self, learner: str, since: float) -> int:
        return max((s["steps"] for s in self.waiting("learner", since) if s["learner"] == learner), default=0)

    def kill_everything(self) -> None:
        if self.process.poll() is not None:
            return
        family = [psutil.Process(self.process.pid), *below(self.process.pid)]
        for process in family:
            if not gone(process):
                process.kill()
        self.process.wait()
        wait_for("all are gone", lambda: all(map(gone, family)))


@pytest.fixture
def start(s3, tmp_path):
    runs: list[Run] = []
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/run"

    def begin(*overrides: str, **env: str) -> Run:
        runs.append(Run(url, tmp_path / f"cwd-{len(runs)}", {**s3.env, **env}, *overrides))
        return runs[-1]

    yield begin
    s3.well()
    for run in runs:
        run.kill_everything()


@pytest.mark.slow
def test_a_run_killed_whole_goes_on_elsewhere_with_nothing_but_the_store(start, tmp_path):
    first = start("train.tokens=1000000000", "checkpoint.snapshot_every_merges=4", "tape.payloads=true")
    first.wait_merges(10)
    first.kill_everything()
    merged = {merge["fragment"]: merge["version"] for merge in first.events("merge")}
    tokens = first.events("merge")[-1]["tokens"]
    store = open_store(first.url)
    assert "summary.json" not in store.names("")

    second = start(f"train.tokens={tokens + 20000}", "run.resume=auto", "tape.payloads=true", "tracking=wandb")
    assert second.wait() == 0, second.log.read_text()
    started = second.events("syncer_started")[-1]
    assert all(started["versions"][p] >= version for p, version in merged.items())
    assert not list(tmp_path.glob("cwd-*/runs"))

    summary = json.loads(store.read("summary.json"))
    assert summary["status"] == "completed"
    work = summary["work"]
    assert work["outstanding"] == 0
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    lines = store.read("events.jsonl").splitlines()
    assert json.loads(lines[-1])["kind"] == "run_ended"
    assert [json.loads(line) for line in lines] == tape.read(f"{first.url}/events.jsonl")[0]
    assert [name for name in store.names("wandb/") if name.endswith(".wandb")]

    assert replay([first.url]) == 0  # every merge is on the tape, also of the last moment before the kill
    fsspec.filesystem("s3").get(f"{first.url}/model", str(tmp_path / "model"), recursive=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.num_parameters() == work["parameters"]
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("def").input_ids == list(b"def")


@pytest.mark.slow
def test_several_nodes_share_a_run_folder_that_is_a_url(s3, tmp_path, monkeypatch):
    """Each node with a cache of its own, and one learner on each."""
    for key, value in s3.env.items():
        monkeypatch.setenv(key, value)
    caches = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches[0]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "labels": {"zone": "a"}})
    try:
        cluster.add_node(num_cpus=1, labels={"zone": "b"}, env_vars={"XDG_CACHE_HOME": str(caches[1])})
        keys = ["run.cache_dir=null", "train.tokens=20000", "supervisor.linger_s=2"]
        keys += ["pools.local.label_selector={zone: a}", "+pools.b.min_learners=1", "+pools.b.label_selector={zone: b}"]
        env = {**s3.env, "RAY_ADDRESS": cluster.address}
        run = Run(f"s3://{BUCKET}/{uuid.uuid4().hex}/run", tmp_path / "cwd", env, *keys)
        assert run.wait() == 0, run.log.read_text()
    finally:
        cluster.shutdown()
    assert {event["learner"] for event in run.events("first_merge")} == {"learner-0", "learner-1"}
    assert is_complete(open_store(run.url), "model")
    for cache in caches:
        (data,) = cache.glob("decoupled-diloco/*/data")
        assert (data / COMPLETE).is_file()


def test_an_outage_pauses_merges_not_steps_and_all_goes_on_when_it_is_over(start, s3):
    run = start("train.tokens=1000000000", "supervisor.sample_every_s=0.5")
    run.wait_merges(6)
    with s3.away():
        down = time.time()
        wait_for("the journal fails", lambda: run.waiting("journal_failed", since=down), WAIT_S)
        for learner in ("learner-0", "learner-1"):
            first = wait_for(f"{learner} is seen", lambda name=learner: run.steps(name, down), WAIT_S)
            wait_for(f"{learner} steps on", lambda name=learner, first=first: run.steps(name, down) > first, WAIT_S)
        assert run.process.poll() is None, run.log.read_text()
        up = time.time()
    merges = len(run.events("merge"))
    run.wait_merges(merges + 6)
    assert not [merge for merge in run.events("merge") if down + 1 < merge["at"] < up]
    told = [sample["learner"] for sample in run.events("learner") if down < sample["at"] < up]
    assert set(told) == {"learner-0", "learner-1"}  # what waited on the syncer's machine has come
    assert {event["incarnation"] for event in run.events("join")} == {1}
    assert len(run.events("syncer_started")) == 1
    assert [event for event in run.events("journal_failed") if down < event["at"]]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.log.read_text()
    summary = json.loads(open_store(run.url).read("summary.json"))
    assert summary["status"] == "stopped"
    assert summary["work"]["outstanding"] == 0
