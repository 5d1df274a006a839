"""A cluster's job server. Needs `RAY_AUTH_MODE` to be set before it is imported: Ray reads it once."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from app.config import ConfigError
from app.jobs.job import Job, JobError, job_from

LOCAL = "http://127.0.0.1:8265"
"""Where `ray start --head` puts the job server."""
PORTS = {"http": 80, "https": 443}
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
LISTEN_S = 5.0
"""Seconds in which an address must accept a connection."""
ANSWER_S = 60.0
"""Seconds in which it must answer."""
TALKATIVE = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Loggers of Ray's client, which tell of every upload and connection."""


def address_of(given: str | None) -> str:
    """The job server's address: `--address`, else that of the environment, else this machine's. Raises ConfigError."""
    found = ((name, value) for name in VARIABLES if (value := os.environ.get(name)))
    key, address = ("--address", given) if given is not None else next(found, ("--address", LOCAL))
    url = urlsplit(address)
    try:
        well = url.scheme in PORTS and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        well = False
    if not well:
        allowed = f"--address with the URL of the cluster's dashboard is needed, as {LOCAL}"
        raise ConfigError(key, address, allowed)
    return address.rstrip("/")


class _Client(JobSubmissionClient):
    """Ray's client, with a time limit for each answer."""

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=ANSWER_S, **kwargs)


class Cluster:
    """What can be asked of it. Every method raises JobError when there is no good answer."""

    def __init__(self, address: str):
        """Raises ConfigError when no job server that lets this client in answers there."""
        self.address = address
        url = urlsplit(address)
        for name in VARIABLES:  # Ray would prefer them
            os.environ.pop(name, None)
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            socket.create_connection((url.hostname, url.port or PORTS[url.scheme]), timeout=LISTEN_S).close()
            with _in_one_line():
                self._client = _Client(address)
        except (OSError, JobError) as error:
            raise ConfigError("--address", address, f"no cluster can be used there: {error}") from error

    def submit(self, job_id: str, entrypoint: str, package: Path, variables: dict[str, str]) -> None:
        """Start a job with the code in `package`, a zip."""
        environment = {"working_dir": str(package), "env_vars": variables}
        with _in_one_line():
            self._client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=environment)

    def jobs(self) -> list[Job]:
        """The jobs of this project that the cluster knows, dead or alive."""
        with _in_one_line():
            found = [job_from(vars(details)) for details in self._client.list_jobs()]
        return [job for job in found if job is not None]

    def details(self, job_id: str) -> dict[str, Any]:
        """A job as Ray describes it."""
        with _in_one_line():
            return dict(vars(self._client.get_job_info(job_id)))

    def stop(self, job_id: str) -> None:
        """SIGTERM to a job's driver, and SIGKILL when it has had its time. Does not wait."""
        with _in_one_line():
            self._client.stop_job(job_id)

    def log(self, job_id: str) -> str:
        """All of a job's log."""
        with _in_one_line():
            return str(self._client.get_job_logs(job_id))

    async def tail(self, job_id: str) -> AsyncGenerator[str, None]:
        """A job's log from its start, piece by piece, until the job has ended."""
        with _in_one_line():
            async with aclosing(self._client.tail_job_logs(job_id)) as pieces:
                async for piece in pieces:
                    yield piece


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except AuthenticationError as error:
        why = str(error).partition("\n")[0]
        raise JobError(f"{why}; its token is needed in RAY_AUTH_TOKEN or ~/.ray/auth_token") from error
    except (OSError, RuntimeError, ValueError, KeyError, aiohttp.ClientError) as error:
        raise JobError(str(error).partition("\n")[0] or repr(error)) from error
