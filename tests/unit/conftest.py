"""The kinds of stores that a run may lie in, each real."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import fsspec
import pytest

from tests.s3 import BUCKET, S3Server, serving


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture
def s3(s3_session: S3Server) -> Iterator[S3Server]:
    """An S3 server on loopback that is well when a test begins."""
    yield s3_session
    s3_session.well()


@contextmanager
def _place(kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    if kind == "s3":
        request.getfixturevalue("s3")
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}/run"
    elif kind == "memory":
        name = uuid.uuid4().hex
        yield f"memory://{name}/run"
        with suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(f"/{name}", recursive=True)
    else:
        yield str(request.getfixturevalue("tmp_path") / "new" / "folder")


@pytest.fixture(params=["local", "memory", "s3"])
def location(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a folder of its own may be made, in each kind of store."""
    with _place(request.param, request) as place:
        yield place


@pytest.fixture(params=["local", "s3"])
def busy_location(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same in stores for several writers at once."""
    with _place(request.param, request) as place:
        yield place


@pytest.fixture(params=["memory", "s3"])
def far_location(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same in stores that are no folders."""
    with _place(request.param, request) as place:
        yield place


@pytest.fixture
def s3_location(s3: S3Server) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/run"
