"""Runs as Ray jobs, from the command line: `python -m app.submit [--address URL] [--detach] -- [overrides]`.

A job lives on its cluster, whatever becomes of this process. Exit code: that of the job where it is followed to its
end; 2 for what is refused before anything is done; 1 when the cluster is lost; 130 after Ctrl-C, which stops nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from app.config import ConfigError, load
from app.config.location import check_in_job
from app.jobs.job import (
    STOP_WAIT,
    STOPPED,
    SUCCEEDED,
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
from app.ray_token import send_token

if TYPE_CHECKING:  # imports Ray, which takes a second, and is not needed to refuse a configuration
    from app.jobs.cluster import Cluster

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "scripts/submit.sh"
EXIT_LOST, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
STOP_WAIT_S = 600
"""Seconds that a stopped job has for its last round and checkpoint, unless RAY_JOB_STOP_WAIT_TIME_S says otherwise."""
SCALE_WAIT_S = 5
UNSAID = " It left no exit code: it was killed before its checkpoint, or had not started its run."

USAGE = f"""usage: {COMMAND} [--address URL] [--detach] -- [overrides]
       {COMMAND} [--address URL] status [JOB]
       {COMMAND} [--address URL] logs [JOB] [--no-follow]
       {COMMAND} [--address URL] stop [JOB]
       {COMMAND} [--address URL] scale POOL N [JOB]

Submits a run to a Ray cluster, follows its log and passes its exit code on. The overrides are those of
scripts/train.sh; run.dir must be an absolute path that all nodes see, or a URL. Ctrl-C, or a lost terminal, only ends
the following: the job goes on.

  --address URL  the cluster's dashboard, http://host:port; else RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else
                 http://127.0.0.1:8265. Its token is taken from RAY_AUTH_TOKEN or ~/.ray/auth_token
  --detach       submit, and do not follow

  status         the jobs of this project, or one of them
  logs           a job's log from its start, and on to its end; --no-follow: what there is
  stop           last round, checkpoint, then out; waits for it
  scale          let a pool of the living run have N learners at most

JOB is a submission id, or the beginning of one. Without it the only job that is alive is meant; `logs` takes the
newest when none is."""


def main(arguments: list[str]) -> int:
    """Do what the arguments say, and return the exit code."""
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    signal.signal(signal.SIGINT, _interrupt)
    try:
        options = _parse(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except (ConfigError, JobError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_LOST


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Once: what then has to be said and closed is not interrupted again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


# ---- the arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise JobError(f"{message}; {COMMAND} --help says more")


def _parse(arguments: list[str]) -> argparse.Namespace:
    shared = _Parser(add_help=False)
    shared.add_argument("--address", default=argparse.SUPPRESS)
    if "--" in arguments:
        at = arguments.index("--")
        submit = _Parser(parents=[shared], add_help=False, allow_abbrev=False)
        submit.add_argument("--detach", action="store_true")
        options = submit.parse_args(arguments[:at])
        options.run, options.overrides = _submit, arguments[at + 1 :]
    else:
        parser = _Parser(parents=[shared], add_help=False, allow_abbrev=False)
        commands = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
        for name, run in {"status": _status, "logs": _logs, "stop": _stop, "scale": _scale}.items():
            command = commands.add_parser(name, parents=[shared], add_help=False, allow_abbrev=False)
            command.set_defaults(run=run)
            if name == "scale":
                command.add_argument("pool", metavar="POOL")
                command.add_argument("most", metavar="N", type=int)
            if name == "logs":
                command.add_argument("--no-follow", action="store_true")
            command.add_argument("job", metavar="JOB", nargs="?")
        options = parser.parse_args(arguments)
        if options.command is None:
            raise JobError(f"overrides are needed, after --, or a command; {COMMAND} --help says more")
    options.given = getattr(options, "address", None)
    return options


def _connect(options: argparse.Namespace) -> Cluster:
    send_token()
    from app.jobs.cluster import Cluster, address_of

    return Cluster(address_of(options.given))


# ---- the commands


def _submit(options: argparse.Namespace) -> int:
    overrides: list[str] = options.overrides
    config = load(overrides, here=False)
    check_in_job(config.run)
    wait_s = stop_wait()
    cluster = _connect(options)
    job_id = new_id(config.run.path)
    with tempfile.TemporaryDirectory() as folder:
        from app.jobs.package import write_package

        package = Path(folder) / "project.zip"
        size = write_package(ROOT, package)
        cluster.submit(job_id, entrypoint(overrides), package, {STOP_WAIT: str(wait_s)})
    print(f"submitted {job_id} to {cluster.address}, with {size / 1000:,.0f} kB of code", flush=True)
    if options.detach:
        _say_how_to_go_on(options, job_id)
        return 0
    return _follow(options, cluster, job_id)


def _status(options: argparse.Namespace) -> int:
    cluster = _connect(options)
    jobs = sorted(cluster.jobs(), key=lambda job: job.started_at)
    if options.job is not None:
        jobs = [choose(jobs, options.job)]
    if not jobs:
        print(f"no job of this project is on {cluster.address}")
    for job in jobs:
        print(_line(job))
        if job.living and (words := own_lines(cluster.log(job.id)).splitlines()):
            print(f"    {words[-1]}")
    return 0


def _logs(options: argparse.Namespace) -> int:
    cluster = _connect(options)
    job = choose(cluster.jobs(), options.job, ended=True)
    if options.no_follow:
        print(cluster.log(job.id), end="")
        return 0
    return _follow(options, cluster, job.id)


def _stop(options: argparse.Namespace) -> int:
    from app.jobs.log import Log

    cluster = _connect(options)
    job = choose(cluster.jobs(), options.job)
    if not job.living:
        raise JobError(f"{job.id} is not alive: {job.status}")
    shown = len(cluster.log(job.id))
    cluster.stop(job.id)
    asked = time.monotonic()
    print(f"stopping {job.id}: last round and checkpoint, for which it has {job.stop_wait_s} s", flush=True)
    try:
        ended = _known(Log(cluster, job.id, sys.stdout, shown).follow())
    except KeyboardInterrupt:
        print("\nit stops all the same", flush=True)
        raise
    code, took_s = told_code(cluster.log(job.id)), time.monotonic() - asked
    print(how_it_stopped(ended, code, took_s))
    killed = code is None and took_s >= job.stop_wait_s
    return 0 if ended.status == SUCCEEDED or (ended.status == STOPPED and not killed) else EXIT_LOST


def _scale(options: argparse.Namespace) -> int:
    """By a job of its own: this machine need not reach more of the cluster than its job server."""
    from app.jobs.log import Log
    from app.jobs.package import write_package

    cluster = _connect(options)
    job = choose(cluster.jobs(), options.job)
    if job.run_dir is None:
        raise JobError(f"{job.id} does not say where its run lies")
    command = shlex.join(["python", "-m", "app.scale", job.run_dir, options.pool, str(options.most)])
    job_id = f"scale-{new_id(job.run_dir)}"
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as unseen:
        package = Path(folder) / "project.zip"
        write_package(ROOT, package)
        cluster.submit(job_id, f"exec {command}", package, {STOP_WAIT: str(SCALE_WAIT_S)})
        details = Log(cluster, job_id, unseen).follow()
    print(own_lines(cluster.log(job_id)) or details["message"], end="")
    code = details["driver_exit_code"]
    return EXIT_LOST if code is None or code < 0 else int(code)


# ---- what they have in common


def _follow(options: argparse.Namespace, cluster: Cluster, job_id: str) -> int:
    from app.jobs.log import Log

    log = Log(cluster, job_id, sys.stdout)
    try:
        job = _known(log.follow())
    except KeyboardInterrupt:
        print(f"\nnot followed any more; {job_id} goes on", flush=True)
        _say_how_to_go_on(options, job_id)
        return EXIT_INTERRUPTED
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        _say_how_to_go_on(options, job_id)
        return EXIT_LOST
    text = cluster.log(job_id) if job.status == STOPPED else ""
    code = exit_code(job, text)
    if job.status != SUCCEEDED:
        why = job.message.partition("\n")[0].removesuffix(", last available logs (truncated to 20,000 chars):")
        unsaid = "" if job.status != STOPPED or told_code(text) is not None else UNSAID
        print(f"{job_id} is {job.status}: {why}{unsaid}", file=sys.stderr)
    return code


def _known(details: dict[str, object]) -> Job:
    job = job_from(details)
    assert job is not None, details
    return job


def _say_how_to_go_on(options: argparse.Namespace, job_id: str) -> None:
    at = "" if options.given is None else f"--address {shlex.quote(options.given)} "
    for command, what in {"logs": "follows it", "stop": "checkpoints and ends it"}.items():
        print(f"  {COMMAND} {at}{command} {job_id}   {what}", flush=True)


def stop_wait() -> int:
    """Seconds that a job has when it is stopped. Raises ConfigError."""
    text = os.environ.get(STOP_WAIT, str(STOP_WAIT_S))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(STOP_WAIT, text, "whole seconds are needed")
    return int(text)


def _line(job: Job) -> str:
    until = job.ended_at if job.ended_at is not None else time.time()
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started_at))
    return f"{job.id}  {job.status}  {started}, {until - job.started_at:,.0f} s  {job.run_dir or '-'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
