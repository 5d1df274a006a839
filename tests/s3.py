"""A real S3 server on loopback (moto's), which can be stopped, started again where it was, and made to fail."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import boto3
import fsspec
from fsspec.config import conf
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from tests.ports import HOST, free_port

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
Choice = Callable[[str, str], bool]


def never(_method: str, _path: str) -> bool:
    return False


class S3Server:
    """What is in its buckets stays when it is stopped."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self._port = free_port()
        self.failing: Choice = never
        self.losing: Choice = never
        self.cutting: Choice = never
        """Requests (method, path) that are answered with 500, the second kind after they were carried out; and those
        whose
        answer ends after half of its bytes."""
        self.careless = False
        """If-None-Match is not looked at, as by servers of older times."""
        self.requests: list[tuple[str, str]] = []
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
        self.start()
        boto3.client("s3", endpoint_url=self.url, region_name="us-east-1").create_bucket(Bucket=BUCKET)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {**KEYS, "FSSPEC_S3_ENDPOINT_URL": self.url}

    def start(self) -> None:
        self._server = make_server(HOST, self._port, self._answer, threaded=True, request_handler=MotoRequestHandler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Nobody listens on return."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        self._server = None

    @contextmanager
    def away(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def well(self) -> None:
        self.failing = self.losing = self.cutting = never
        self.careless = False
        if self._server is None:
            self.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = (environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"]))
        self.requests.append(request)
        if self.careless:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if self.failing(*request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _failure(start_response)
        if self.losing(*request):
            list(self._app(environ, lambda *_: None))
            return _failure(start_response)
        body: Iterable[bytes] = self._app(environ, start_response)
        if self.cutting(*request):
            whole = b"".join(body)
            return [whole[: len(whole) // 2]]
        return body


def _failure(start_response: Any) -> list[bytes]:
    start_response("500 Internal Server Error", [("Content-Type", "text/plain"), ("Content-Length", "4")])
    return [b"oops"]


@contextmanager
def serving() -> Iterator[S3Server]:
    """A server that this process and those it starts find under s3://."""
    before = {key: os.environ.get(key) for key in KEYS}
    os.environ.update(KEYS)
    server = S3Server()
    conf["s3"] = {"endpoint_url": server.url}
    try:
        yield server
    finally:
        server.well()
        server.stop()
        del conf["s3"]
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
