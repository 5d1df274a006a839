"""A real full disk under a living run: merges wait for it, steps do not, and nothing that was merged is lost.

The checkpoints folder, where the syncer's journal and the ledger's state lie, is a small file system of its own. The
tests of this module share one run and leave it training.
"""

import json
import subprocess
import time

import pytest

from actors.ledger import STATE
from actors.spec import LEDGER
from tests.cluster.audit import assert_every_sample_has_one_place, processes
from tests.cluster.harness import LiveRun, kill, wait_for

pytestmark = pytest.mark.timeout(300)

STEPS = 500
"""Many times those for which blocks are leased ahead."""


class Disk:
    """A file system of 8 MiB."""

    def __init__(self, folder):
        self.folder, self._filler = folder, folder / "filler"

    def fill(self):
        """Leave no room at all; what others free meanwhile is taken by the next call."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while file.write(bytes(size)) == size:
                        continue
                except OSError:
                    continue

    def free(self):
        """Give the room back; returns the time just before."""
        now = time.time()
        self._filler.unlink(missing_ok=True)
        return now


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full") / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    mounted = subprocess.run(mounting, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def run(cluster, disk):
    live = LiveRun(disk.folder.parent, ["learners=2"])
    yield live
    live.close()


@pytest.fixture
def full(run, disk):
    """The disk, full: the journal has failed and merges are paused."""
    run.wait_training()
    failures = len(run.events("journal_failed"))

    def failed():
        disk.fill()
        return len(run.events("journal_failed")) > failures and run.syncer().paused

    wait_for("merges are paused", failed)
    yield disk
    disk.free()


def wait_steps(run, more, disk=None):
    """Every learner, still the same process, makes that many more steps. A disk that is given is full all the time."""
    before = {name: run.learner(name) for name in run.config.learner_ids}
    for name, old in before.items():

        def stepped(name=name, old=old):
            if disk is not None:
                disk.fill()
            return (now := run.status(name)) and now.steps >= old.steps + more and now

        assert wait_for(f"{name} steps on", stepped).pid == old.pid


def check_merging_again(run, since):
    """Merges hold work of every learner again, and of no incarnation but the first."""
    for name in run.config.learner_ids:
        wait_for(f"{name} is merged again", lambda name=name: run.merged_since(since, name, 1))
    assert run.syncer().work_exact
    assert not run.events("leave")
    versions = {}
    for merge in run.events("merge"):
        assert merge["version"] == versions.get(merge["fragment"], 0) + 1
        versions[merge["fragment"]] = merge["version"]


def test_a_full_disk_pauses_merges_not_steps(run, full):
    versions = run.versions()
    wait_steps(run, STEPS, full)
    status = run.syncer()
    assert status.paused
    assert status.versions == versions  # they could not rise, and never fall
    assert status.work_exact
    freed = full.free()
    check_merging_again(run, freed)
    assert not run.syncer().paused
    assert run.events("resumed")[-1]["at"] >= freed


def test_a_ledger_that_cannot_write_its_state_leases_on(run, full):
    state = full.folder / STATE
    before = state.stat().st_mtime_ns, json.loads(state.read_text())["book"]["next_id"]
    wait_steps(run, STEPS, full)
    assert state.stat().st_mtime_ns == before[0]  # it could not be written
    check_merging_again(run, full.free())
    wait_for("its state is written", lambda: json.loads(state.read_text())["book"]["next_id"] > before[1])
    pid = run.call(LEDGER, "pid")
    kill(pid)
    wait_for("the ledger is back", lambda: (new := run.try_call(LEDGER, "pid")) and new != pid)
    wait_steps(run, STEPS)


def test_a_syncer_killed_on_a_full_disk_waits_for_it_and_goes_on_under_the_next_epoch(run, full):
    before = run.syncer()
    kill(before.pid)
    (waiting,) = wait_for("another syncer's process starts", lambda: processes("Syncer"))
    wait_steps(run, STEPS, full)
    assert len(run.events("syncer_started")) == 1
    freed = full.free()
    after = run.syncer()
    assert after.epoch == before.epoch + 1
    assert after.pid == waiting.pid  # the same process: it has waited
    assert run.events("syncer_started")[-1]["at"] >= freed > waiting.create_time()
    assert all(new >= old for new, old in zip(after.versions, before.versions, strict=True))
    check_merging_again(run, freed)


def test_the_run_ends_balanced(run):
    summary = run.finish()
    assert summary["status"] == "stopped"
    work = summary["work"]
    assert work["outstanding"] == 0
    assert work["processed"] == work["merged"] + sum(work["discarded"].values())
    assert_every_sample_has_one_place(run, summary)
    assert {learner["incarnations"] for learner in summary["learners"].values()} == {1}
    assert summary["syncer"]["incarnations"] == 2
