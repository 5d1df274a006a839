"""Jobs as values, the code that travels with them, and a log that is followed over lost connections."""

import io
import shutil
import subprocess
import sys
import zipfile

import pytest

from app.config import ConfigError, load
from app.config.location import check_in_job
from app.jobs import log as following
from app.jobs.job import (
    Job,
    JobError,
    choose,
    entrypoint,
    exit_code,
    how_it_stopped,
    job_from,
    new_id,
    own_lines,
    told_code,
)
from app.jobs.log import Log
from app.jobs.package import write_package
from app.submit import ROOT, stop_wait


def job(name, status="RUNNING", started=0.0, code=None):
    return Job(name, status, "/runs/a", started, None, code, "", 3)


# ---- which job


def test_the_only_one_alive_is_meant():
    jobs = [job("a-1", "SUCCEEDED", 3.0), job("b-1", "RUNNING", 1.0), job("c-1", "STOPPED", 2.0)]
    assert choose(jobs, None).id == "b-1"


def test_of_several_alive_one_must_be_named():
    jobs = [job("a-1"), job("b-1", "PENDING")]
    with pytest.raises(JobError, match="name one of a-1, b-1"):
        choose(jobs, None)
    assert choose(jobs, "b").id == "b-1"


def test_where_none_is_alive_the_newest_is_meant_if_one_that_has_ended_will_do():
    jobs = [job("a-1", "SUCCEEDED", 3.0), job("b-1", "FAILED", 1.0)]
    assert choose(jobs, None, ended=True).id == "a-1"
    with pytest.raises(JobError, match="the last one, a-1, is SUCCEEDED"):
        choose(jobs, None)
    with pytest.raises(JobError, match="no job of this project is alive"):
        choose([], None, ended=True)


def test_a_name_is_an_id_or_the_beginning_of_one():
    jobs = [job("run"), job("run-1"), job("run-2")]
    assert choose(jobs, "run").id == "run"
    assert choose(jobs, "run-2").id == "run-2"
    with pytest.raises(JobError, match="there are: run-1, run-2"):
        choose(jobs, "run-")
    with pytest.raises(JobError, match="no jobs of this project begin with x; there are: run, run-1, run-2"):
        choose(jobs, "x")


def test_ids_carry_the_name_of_the_run_folder():
    for place in ("/shared/my run", "s3://bucket/team/my run/"):
        assert new_id(place).startswith("my-run-")
    assert new_id("/").startswith("run-")
    assert new_id("/a") != new_id("/a")


# ---- what a cluster says of a job


def details(**changes):
    told = {
        "submission_id": "a-1",
        "entrypoint": entrypoint(["run.dir=/runs/a b", "learners=2"]),
        "status": "RUNNING",
        "start_time": 2000,
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "50"}},
    }
    return told | changes


def test_a_job_is_read_from_what_ray_says_of_it():
    read = job_from(details())
    assert (read.id, read.status, read.run_dir, read.started_at) == ("a-1", "RUNNING", "/runs/a b", 2.0)
    assert (read.stop_wait_s, read.living) == (50, True)
    assert job_from(details(runtime_env=None, status="FAILED")).stop_wait_s == 3
    assert not job_from(details(status="FAILED")).living


def test_jobs_submitted_by_other_means_are_known_and_those_of_others_are_not():
    assert job_from(details(entrypoint="python -m app.train +run.dir='s3://b/c'")).run_dir == "s3://b/c"
    assert job_from(details(entrypoint="python -m app.train")).run_dir is None
    for other in ("python train.py", "echo 'unclosed", None, "python -m app.scale /runs/a local 3"):
        assert job_from(details(entrypoint=other)) is None
    assert job_from(details(submission_id=None)) is None  # a driver that is no submitted job


@pytest.mark.parametrize(
    ("status", "code", "log", "passed_on"),
    [
        ("SUCCEEDED", 0, "", 0),
        ("FAILED", 2, "", 2),
        ("FAILED", 1, "exit code 7\n", 1),
        ("FAILED", -9, "", 137),
        ("FAILED", None, "", 1),
        ("STOPPED", None, "checkpoint\nexit code 143\n", 143),
        ("STOPPED", None, "exit code 0", 0),
        ("STOPPED", None, "exit code 5\nkilled later", 143),
        ("STOPPED", None, "", 143),
    ],
)
def test_exit_codes(status, code, log, passed_on):
    assert exit_code(job("a", status, code=code), log) == passed_on


def test_only_the_last_line_tells_the_exit_code():
    assert told_code("exit code 130\n") == 130
    assert told_code("exit code 130\nmore\n") is told_code("exit code x") is told_code("") is None


def test_own_lines_come_after_those_of_ray():
    log = "12:00 INFO Runtime env is setting up.\nRunning entrypoint for job a-1: exec python\nfirst\nsecond\n"
    assert own_lines(log) == "first\nsecond\n"
    assert own_lines("only\n") == "only\n"


# ---- what is refused before anything is submitted


@pytest.mark.parametrize("place", ["runs/a", "./a", "a"])
def test_a_relative_run_folder_is_refused_in_a_job(place):
    with pytest.raises(ConfigError, match=r"run.dir=.* absolute path or a URL"):
        check_in_job(load([f"run.dir={place}"]).run)


@pytest.mark.parametrize("place", ["/runs/a", "~/runs", "s3://bucket/a"])
def test_other_run_folders_are_fine(place):
    check_in_job(load([f"run.dir='{place}'"]).run)


def test_files_that_only_the_cluster_has_are_not_looked_for_here():
    elsewhere = [
        "data=files",
        "data.path=/no/such",
        "data.tokenizer=/no/such/either",
        "model=hf",
        "model.path=/no/such",
    ]
    assert load(elsewhere, here=False).data.path == "/no/such"
    with pytest.raises(ConfigError, match="no such file"):
        load(elsewhere)


# ---- the code that travels


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    for name in ("app", "actors", "conf", "scripts", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_the_code_alone_travels_and_runs_from_its_package(project, tmp_path):
    for name in ("runs/main/model.bin", ".git/x", ".venv/x", "data/x", "app/__pycache__/x.pyc", "conf/.x.swp"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(b"x" * 1000)
    size = write_package(project, tmp_path / "one.zip")
    assert size == (tmp_path / "one.zip").stat().st_size < 2_000_000
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "there")
    assert {name.partition("/")[0] for name in names} == {"app", "actors", "conf"}
    assert not [name for name in names if "__pycache__" in name or "/." in name]

    asked = [sys.executable, "-m", "app.train", "--cfg", "job", "learners=3"]
    shown = subprocess.run(asked, cwd=tmp_path / "there", capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "learners: 3" in shown.stdout


def test_the_same_code_makes_the_same_package(project, tmp_path):
    write_package(project, tmp_path / "one.zip")
    (project / "app" / "train.py").touch()
    write_package(project, tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_too_much_code_and_none_are_refused(project, tmp_path, monkeypatch):
    monkeypatch.setattr("app.jobs.package.MOST_BYTES", 1000)
    with pytest.raises(JobError, match="1,000 are allowed"):
        write_package(project, tmp_path / "one.zip")
    with pytest.raises(JobError, match=r"pyproject\.toml"):
        write_package(tmp_path, tmp_path / "two.zip")


# ---- following a log


class Cluster:
    """Gives each connection the pieces of a list; the text LOST breaks it, SILENT never comes."""

    LOST, SILENT = object(), object()

    def __init__(self, connections, statuses):
        self.connections, self.statuses = list(connections), list(statuses)

    def details(self, _job_id):
        status = self.statuses.pop(0)
        if status is self.LOST:
            raise JobError("away")
        return {"status": status}

    async def tail(self, _job_id):
        for piece in self.connections.pop(0):
            if piece is self.LOST:
                raise JobError("cut off")
            if piece is self.SILENT:
                await following.asyncio.Event().wait()
            yield piece


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(following, "AGAIN_S", 0.0)
    monkeypatch.setattr(following, "QUIET_S", 0.05)


def followed(connections, statuses, shown=0):
    out = io.StringIO()
    cluster = Cluster(connections, statuses)
    ended = Log(cluster, "a", out, shown).follow()
    assert not cluster.connections
    return out.getvalue(), ended["status"]


def test_a_log_is_shown_piece_by_piece():
    assert followed([["one\n", "two\n"]], ["STOPPED"]) == ("one\ntwo\n", "STOPPED")


def test_what_was_shown_is_not_shown_again():
    assert followed([["one\n", "two\n", "three\n"]], ["FAILED"], shown=6) == ("o\nthree\n", "FAILED")


def test_a_log_goes_on_where_its_connection_broke():
    connections = [["one\n", Cluster.LOST], [Cluster.LOST], ["one\ntwo\n", "three\n"]]
    text, status = followed(connections, ["RUNNING", Cluster.LOST, "SUCCEEDED"])
    assert (text.count("trying again"), status) == (2, "SUCCEEDED")
    told = "the connection is lost, trying again: cut off\n"
    assert text.replace(told, "") == "one\ntwo\nthree\n"


def test_a_silent_connection_is_given_up():
    connections = [["one\n", Cluster.SILENT], ["one\n", "two\n"]]
    assert followed(connections, ["RUNNING", "SUCCEEDED"]) == ("one\ntwo\n", "SUCCEEDED")


def test_the_rest_of_a_log_is_fetched_when_the_job_ended_while_the_connection_was_broken():
    connections = [["one\n", Cluster.SILENT], ["one\n", "two\n"]]
    assert followed(connections, ["FAILED", "FAILED"]) == ("one\ntwo\n", "FAILED")


def test_a_log_that_nobody_has_any_more_does_not_hold_up_how_the_job_ended():
    assert followed([[Cluster.LOST], [Cluster.LOST]], ["FAILED", "FAILED"])[1] == "FAILED"


def test_a_cluster_that_stays_away_is_given_up(monkeypatch):
    monkeypatch.setattr(following, "LOST_S", -1.0)
    with pytest.raises(JobError, match="cut off"):
        followed([[Cluster.LOST]], [])


# ---- how a stop went


@pytest.mark.parametrize(
    ("status", "code", "took_s", "said"),
    [
        ("STOPPED", 143, 5.0, "a has stopped after 5 s, exit code 143: the same command with run.resume=auto goes on"),
        ("STOPPED", None, 1.0, "a has stopped before its run had started"),
        ("STOPPED", None, 3.5, "a was killed after 3 s; its run may live on"),
        ("SUCCEEDED", 0, 1.0, "a has completed: /runs/a/model"),
        ("FAILED", 1, 1.0, "a is FAILED"),
    ],
)
def test_what_became_of_a_stop_is_said(status, code, took_s, said):
    assert how_it_stopped(job("a", status), code, took_s).startswith(said)


def test_the_time_that_a_stop_has_is_whole_seconds(monkeypatch):
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "90")
    assert stop_wait() == 90
    for wrong in ("soon", "0", "1.5", ""):
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", wrong)
        with pytest.raises(ConfigError, match=r"RAY_JOB_STOP_WAIT_TIME_S=.*whole seconds"):
            stop_wait()
