"""`scripts/submit.sh` as a user has it: on a cluster of `ray start` with a token, whose Python lacks the project."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sysconfig
import venv

import psutil
import pytest
from transformers import AutoModelForCausalLM

from below import gone
from tests.cluster.audit import processes
from tests.cluster.harness import wait_for
from tests.e2e.conftest import TWO, clean_env, events_in, started_head
from tests.ports import free_port, free_ports

pytestmark = pytest.mark.timeout(600)

ENDLESS = "train.tokens=1000000000"
TOKEN = secrets.token_hex(32)
WAIT_S = 240.0


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home without a token."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def url(tmp_path_factory, home):
    """The job server of a cluster with token authentication. Code comes to it with jobs alone."""
    folder = tmp_path_factory.mktemp("node") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    base = {"base": str(folder), "platbase": str(folder)}
    with open(os.path.join(sysconfig.get_path("purelib", "venv", base), "packages.pth"), "w") as file:
        file.write(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    alone = subprocess.run([python, "-c", "import ray, app"], cwd="/", env=clean_env(), capture_output=True, text=True)
    assert "No module named 'app'" in alone.stderr
    env = {**clean_env(), "PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(home)}
    ports = free_ports(4)
    others = ["dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port"]
    options = [f"--{name}={port}" for name, port in zip(others, ports[1:], strict=True)]
    options += ["--min-worker-port=0", "--max-worker-port=0", f"--object-store-memory={100 * 2**20}"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with started_head(ports, *options, python=str(python), env={**env, **token}):
        yield f"http://127.0.0.1:{ports[1]}"


class Submit:
    """`scripts/submit.sh` in the background, in a session of its own as a terminal has one."""

    def __init__(self, repository, log, env, *arguments):
        self.log = log
        script = repository / "scripts" / "submit.sh"
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [script, *arguments], cwd="/", env=env, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def output(self):
        return self.log.read_text()

    def wait(self):
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.output}") from None

    def wait_for(self, text):
        def look():
            assert self.process.poll() is None or text in self.output, self.output
            return text in self.output

        wait_for(text, look, WAIT_S)

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def submit(repository, url, home, tmp_path):
    """Starts `scripts/submit.sh`; jobs that a test leaves alive are stopped with it."""
    started = []

    def start(*arguments, token=TOKEN, address=url, **variables):
        env = {**clean_env(), "HOME": str(home), **variables}
        if token is not None:
            env["RAY_AUTH_TOKEN"] = token
        log = tmp_path / f"submit-{len(started)}.log"
        started.append(Submit(repository, log, env, "--address", address, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.end()
    if any("submitted " in each.output for each in started):
        for line in done(start, "status").splitlines():
            if any(state in line.split() for state in ("PENDING", "RUNNING")):
                start("stop", line.split()[0]).wait()


def done(submit, *arguments, code=0):
    """What a command says, when it is over."""
    command = submit(*arguments)
    assert command.wait() == code, command.output
    return command.output


def id_in(output):
    return output.split("submitted ")[1].split()[0]


def merges(folder, count):
    wait_for(f"{count} merges", lambda: len(events_in(folder, "merge")) >= count, WAIT_S)


def driver(folder):
    """The process that a job runs, which is nobody's shell."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "app.train" in words and f"run.dir={folder}" in words:
                found.append(process)
    (one,) = found
    return one


def test_a_submitted_run_is_followed_to_its_end(submit, tmp_path):
    run = submit("--", *TWO, f"run.dir={tmp_path}/run", "train.tokens=30000")
    assert run.wait() == 0, run.output
    job = id_in(run.output)
    assert job.startswith("run-")
    first = run.output.splitlines()[0]
    size = int(first.split("with ")[1].split(" kB")[0].replace(",", ""))
    assert 50 < size < 2000
    assert "gzip -9" in run.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").num_parameters() > 0
    assert not processes()

    (line,) = [line for line in done(submit, "status", job).splitlines() if line.startswith(job)]
    assert line.split()[1] == "SUCCEEDED"
    assert line.endswith(f"{tmp_path}/run")
    again = done(submit, "logs", job)
    assert again in run.output  # all of the log, and nothing but it
    assert f"error: {job} is not alive: SUCCEEDED" in done(submit, "stop", job, code=2)
    assert f"the run in {tmp_path}/run is not alive" in done(submit, "scale", "local", "3", job, code=2)


def test_what_is_wrong_is_refused_before_anything_is_submitted(submit, tmp_path):
    before = done(submit, "status")
    place = f"run.dir={tmp_path}/run"
    for wrong, parts in {
        ("--", *TWO, place, "learners=none"): ("learners=none", "whole number"),
        ("--", *TWO, place, "diloco.fragmens=4"): ("diloco.fragmens", "diloco.fragments"),
        ("--", *TWO): ("run.dir=runs/main", "absolute path or a URL"),
        ("--", *TWO, "run.dir=runs/mine"): ("run.dir=runs/mine", "absolute path or a URL"),
        (*TWO, place): ("invalid choice", "scripts/submit.sh --help"),
        ("scale", "local", "many"): ("many", "scripts/submit.sh --help"),
        ("stop", "nobody"): ("no jobs of this project begin with nobody",),
        (): ("after --",),
    }.items():
        (line,) = done(submit, *wrong, code=2).splitlines()
        assert line.startswith("error: ")
        assert all(part in line for part in parts), line
    assert done(submit, "status") == before
    assert not (tmp_path / "run").exists()


def test_a_job_that_refuses_its_configuration_passes_its_exit_code_on(submit, tmp_path):
    missing = ("data=files", f"data.path={tmp_path}/there-only")
    run = submit("--", *TWO, f"run.dir={tmp_path}/run", *missing)
    assert run.wait() == 2, run.output
    assert f"error: data.path={tmp_path}/there-only is refused: no such file" in run.output


def test_who_has_no_token_or_a_wrong_one_is_refused_and_so_is_an_address_without_a_cluster(submit, tmp_path):
    wanted = ("--", *TWO, f"run.dir={tmp_path}/run")
    nobody = f"http://127.0.0.1:{free_port()}"
    for wrong, part in (
        ({"token": None}, "its token is needed in RAY_AUTH_TOKEN or ~/.ray/auth_token"),
        ({"token": "0" * 64}, "its token is needed in RAY_AUTH_TOKEN or ~/.ray/auth_token"),
        ({"token": None, "RAY_AUTH_MODE": "token"}, "its token is needed in RAY_AUTH_TOKEN or ~/.ray/auth_token"),
        ({"address": nobody}, "refused"),
        ({"address": "127.0.0.1:6379"}, "URL of the cluster's dashboard"),
    ):
        refused = submit(*wanted, **wrong)
        assert refused.wait() == 2, refused.output
        (line,) = refused.output.splitlines()
        assert line.startswith("error: --address="), line
        assert part in line


def test_a_token_in_a_file_is_enough(submit, home):
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(TOKEN)
    try:
        known = submit("status", token=None)
        assert known.wait() == 0, known.output
    finally:
        (home / ".ray" / "auth_token").unlink()
        (home / ".ray").rmdir()


@pytest.mark.slow
def test_a_job_outlives_its_terminal_and_a_stop_checkpoints_it(submit, tmp_path):
    folder = tmp_path / "run"
    same = (*TWO, f"run.dir={folder}")
    first = submit("--", *same, ENDLESS)
    merges(folder, 2)
    job = id_in(first.output)
    os.killpg(first.process.pid, signal.SIGKILL)  # a terminal that is lost, with all that runs in it
    first.process.wait()
    merges(folder, len(events_in(folder, "merge")) + 2)

    found = submit("logs")
    found.wait_for("of 1,000,000,000 tokens")
    for _ in range(2):
        found.process.send_signal(signal.SIGINT)
    assert found.wait() == 130, found.output
    assert "Traceback" not in found.output
    assert f"not followed any more; {job} goes on" in found.output
    assert f" logs {job} " in found.output
    status = done(submit, "status", job)
    assert "RUNNING" in status
    assert "of 1,000,000,000 tokens" in status.splitlines()[-1]

    follower = submit("logs", job)
    follower.wait_for("of 1,000,000,000 tokens")
    beside = id_in(done(submit, "--detach", "--", *TWO, f"run.dir={tmp_path}/beside", "train.tokens=20000"))
    assert f"2 jobs are alive: name one of {job}, {beside}" in done(submit, "stop", code=2)
    assert "completed" in done(submit, "logs", beside)
    said = done(submit, "stop")
    assert "SIGTERM: last round and checkpoint" in said
    assert "exit code 143: the same command with run.resume=auto goes on" in said.splitlines()[-1]
    assert follower.wait() == 143, follower.output
    stopped = json.loads((folder / "summary.json").read_text())
    assert stopped["status"] == "stopped"
    assert stopped["work"]["outstanding"] == 0
    assert not processes()

    refused = submit("--", *same, ENDLESS)
    assert refused.wait() == 2, refused.output
    assert "run.resume=auto goes on from it" in refused.output
    budget = stopped["tokens_processed"] + 20000
    detached = done(submit, "--detach", "--", *same, f"train.tokens={budget}", "run.resume=auto")
    assert f" logs {id_in(detached)} " in detached
    assert "completed" in done(submit, "logs", id_in(detached))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["global_step"] > stopped["global_step"]
    assert (folder / "model").is_dir()


@pytest.mark.slow
def test_a_run_outlives_its_jobs_driver_and_a_resubmission_attaches_to_it(submit, tmp_path):
    folder = tmp_path / "run"
    same = (*TWO, f"run.dir={folder}", ENDLESS)
    first = submit("--", *same)
    merges(folder, 2)
    driver(folder).kill()
    assert first.wait() == 137, first.output
    assert "FAILED" in first.output.splitlines()[-1]
    assert "FAILED" in done(submit, "status", id_in(first.output))
    (learner, *_) = processes("Learner")
    learner.kill()  # what comes in its place needs the code of a job that has ended
    wait_for("it is gone", lambda: gone(learner))
    joins = len(events_in(folder, "join"))
    wait_for("a learner comes back", lambda: len(events_in(folder, "join")) > joins, WAIT_S)
    merges(folder, len(events_in(folder, "merge")) + 2)

    second = submit("--", *same, "run.resume=auto")
    second.wait_for("attached to the living run")
    second.wait_for("of 1,000,000,000 tokens")
    (line,) = done(submit, "scale", "nowhere", "3", code=2).splitlines()
    assert line.startswith("error: ")
    assert "nowhere" in line
    assert done(submit, "scale", "local", "3") == f"pool local of {folder} may have 3 learners now\n"
    wait_for("another joins", lambda: [e for e in events_in(folder, "join") if e["learner"] == "local-0"], WAIT_S)
    done(submit, "stop")
    assert second.wait() == 143, second.output
    assert events_in(folder, "syncer_started")[-1]["epoch"] == 2  # nobody started it again
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert not processes()
