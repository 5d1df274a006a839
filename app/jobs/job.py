"""Jobs as values: what a cluster says of one, which one is meant, and the exit code that it comes to. Pure."""

from __future__ import annotations

import re
import shlex
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LIVING = ("PENDING", "RUNNING")
STOPPED, SUCCEEDED = "STOPPED", "SUCCEEDED"
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""In a job's environment: seconds from SIGTERM to SIGKILL when it is stopped."""
RAYS_STOP_WAIT_S = 3
"""What Ray waits where the job does not say."""
EXIT_TERMINATED = 143
LAST_LINE = "exit code "
"""Begins the last line of a job's log. Ray itself does not keep the code of a job that was stopped."""

_PREAMBLE = "Running entrypoint for job "
"""Begins the line with which Ray ends what it writes into a job's log itself."""
_MODULE = "app.train"
_RUN_DIR = re.compile(r"\+{0,2}run\.dir=(.+)")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


class JobError(Exception):
    """Something that can't be done. `str()` is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))


@dataclass(frozen=True)
class Job:
    """One job of this project, as its cluster sees it."""

    id: str
    """The submission id."""
    status: str
    """PENDING, RUNNING, or how it ended: SUCCEEDED, FAILED, STOPPED."""
    run_dir: str | None
    """Where its run lies."""
    started_at: float
    """Unix time."""
    ended_at: float | None
    code: int | None
    """Exit code of its driver, negative for a signal; None while it lives, and when it was stopped."""
    message: str
    """What Ray says of it."""
    stop_wait_s: int
    """Seconds that it has to end by itself when it is stopped."""

    @property
    def living(self) -> bool:
        """Whether its driver runs, or will."""
        return self.status in LIVING


def job_from(details: Mapping[str, Any]) -> Job | None:
    """A job as Ray describes it; None for one that does not train with this project."""
    try:
        words = shlex.split(details.get("entrypoint") or "")
    except ValueError:
        return None
    if details.get("submission_id") is None or _MODULE not in words:
        return None
    values = [match[1] for word in words if (match := _RUN_DIR.fullmatch(word))]
    variables = (details.get("runtime_env") or {}).get("env_vars") or {}
    wait_s = str(variables.get(STOP_WAIT))
    started, ended = details.get("start_time") or 0, details.get("end_time")
    return Job(
        id=details["submission_id"],
        status=getattr(details["status"], "value", details["status"]),
        run_dir=values[-1].strip("'\"") if values else None,
        started_at=started / 1000,
        ended_at=None if ended is None else ended / 1000,
        code=details.get("driver_exit_code"),
        message=details.get("message") or "",
        stop_wait_s=int(wait_s) if wait_s.isdecimal() else RAYS_STOP_WAIT_S,
    )


def new_id(run_dir: str) -> str:
    """A submission id that says whose it is: the run folder's name, and what makes it unique."""
    name = _UNSAFE.sub("-", run_dir.rstrip("/").rpartition("/")[2]).strip("-.")
    return f"{name or 'run'}-{uuid.uuid4().hex[:6]}"


def entrypoint(overrides: Iterable[str]) -> str:
    """What the job's shell runs; `exec`, so that the signals of a stop and the exit code are the driver's own."""
    return f"exec {shlex.join(['python', '-m', _MODULE, *overrides])}"


def choose(jobs: Iterable[Job], wanted: str | None, ended: bool = False) -> Job:
    """The job that is meant: by id or its beginning, else the only one alive, else with `ended` the newest.

    Raises JobError when there is none, or more than one.
    """
    known = sorted(jobs, key=lambda job: job.started_at)
    if wanted is not None:
        same = [job for job in known if job.id == wanted]
        found = same or [job for job in known if job.id.startswith(wanted)]
        if len(found) != 1:
            names = ", ".join(job.id for job in found or known) or "none"
            raise JobError(f"{len(found) or 'no'} jobs of this project begin with {wanted}; there are: {names}")
        return found[0]
    living = [job for job in known if job.living]
    if len(living) > 1:
        raise JobError(f"{len(living)} jobs are alive: name one of {', '.join(job.id for job in living)}")
    if living:
        return living[0]
    if ended and known:
        return known[-1]
    last = f"; the last one, {known[-1].id}, is {known[-1].status}" if known else ""
    raise JobError(f"no job of this project is alive{last}")


def exit_code(job: Job, log: str) -> int:
    """Exit code of an ended job, as a shell gives it: 128 + n for signal n."""
    if job.status == SUCCEEDED:
        return 0
    if job.code is not None:
        return job.code if job.code >= 0 else 128 - job.code
    if job.status == STOPPED:
        told = told_code(log)
        return EXIT_TERMINATED if told is None else told
    return 1


def told_code(log: str) -> int | None:
    """The exit code in the last line of a log; None where the driver did not come to write it."""
    last = log.rstrip("\n").rpartition("\n")[2]
    code = last.removeprefix(LAST_LINE)
    return int(code) if last.startswith(LAST_LINE) and code.isdecimal() else None


def own_lines(log: str) -> str:
    """A job's log without what Ray writes before it."""
    lines = log.splitlines(keepends=True)
    first = next((i + 1 for i, line in enumerate(lines) if line.startswith(_PREAMBLE)), 0)
    return "".join(lines[first:])


def how_it_stopped(job: Job, code: int | None, took_s: float) -> str:
    """What became of a stop. `code`: the exit code that its driver wrote down."""
    again = "the same command with run.resume=auto"
    if job.status == SUCCEEDED:
        return f"{job.id} has completed: {job.run_dir}/model"
    if job.status != STOPPED:
        return f"{job.id} is {job.status}: {job.message.partition(chr(10))[0]}"
    if code is not None:
        return f"{job.id} has stopped after {took_s:.0f} s, exit code {code}: {again} goes on from {job.run_dir}"
    if took_s < job.stop_wait_s:
        return f"{job.id} has stopped before its run had started: {again} goes on from what there is"
    return (
        f"{job.id} was killed after {job.stop_wait_s} s; its run may live on, and ends by itself: "
        f"{again} attaches to it or goes on from {job.run_dir}"
    )
