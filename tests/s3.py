"""A real S3 server on loopback, and an HTTP front before it that fails as it is told."""

import http.client
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

KEY, SECRET = "AKIARECOGNISABLE0KEY", "recognisable/Secret+of/these/tests"
ALWAYS = 10**9
clients_of: dict[str, str] = {}  # the variables that s3fs's cached clients were made with

Kind = Literal[403, 500, 503, 507, "cut", "slow"]
CODES = {403: "ExpiredToken", 500: "InternalError", 503: "ServiceUnavailable", 507: "XMinioStorageFull"}
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "date", "server"}


@contextmanager
def serving() -> Iterator[str]:
    """Runs an empty S3 server and gives its URL."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def environment(url: str) -> dict[str, str]:
    """Returns the variables by which S3 clients find the server at ``url``."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def using(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables and no other of S3's, and forgets the clients that were made with others."""
    from s3fs import S3FileSystem

    wanted = {name: value for name, value in variables.items() if name.startswith("AWS_")}
    if wanted != clients_of:  # making one takes a second
        S3FileSystem.clear_instance_cache()
        clients_of.clear()
        clients_of.update(wanted)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@contextmanager
def secret_block(uri: str, endpoint: str) -> Iterator[str]:
    """Gives the name of a Prefect block for ``uri`` that holds everything the environment would."""
    from prefect.filesystems import RemoteFileSystem

    name = f"secret-store-{uuid.uuid4().hex[:8]}"
    settings = {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": endpoint}}
    RemoteFileSystem(basepath=uri, settings=settings).save(name)
    yield name
    RemoteFileSystem.delete(name)


def contents(bucket: str) -> dict[str, bytes]:
    """Returns every object of a bucket, by its key, as the server has it now."""
    import fsspec

    fs = fsspec.filesystem("s3", use_listings_cache=False)
    return {path.partition("/")[2]: fs.cat_file(path) for path in fs.find(bucket)}


@dataclass(kw_only=True)
class Fault:
    """What becomes of the next ``times`` requests of ``method`` whose path holds ``path``."""

    kind: Kind
    method: str
    path: str
    times: int
    seconds: float


class Front:
    """The front at ``url``: hands every request on to ``upstream``, but for those that are to fail."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []  # method and path
        self.watch: Any = None  # called after every request that the server has answered
        self._lock = Lock()
        self._port = 0
        self.listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def fail(self, kind: Kind, method: str, path: str = "", *, times: int = ALWAYS, seconds: float = 0.0) -> None:
        self.faults.append(Fault(kind=kind, method=method, path=path, times=times, seconds=seconds))

    def mend(self) -> None:
        """Lets every request through from now on, and forgets those it has seen."""
        if not self._listening:
            self.listen()
        self.faults.clear()
        self.seen.clear()
        self.watch = None

    def count(self, method: str, path: str = "") -> int:
        return sum(method == m and path in p for m, p in self.seen)

    def listen(self) -> None:
        """Accepts connections, on the port it had before if there was one."""

        class Handler(FrontHandler):
            front = self

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._listening = True
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def refuse(self) -> None:
        """Refuses connections from now on."""
        self._listening = False
        self._server.shutdown()
        self._server.server_close()

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.method == method and fault.path in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


class FrontHandler(BaseHTTPRequestHandler):
    """One connection."""

    front: Front
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        fault = self.front.fault_of(self.command, self.path)
        self.close_connection = True  # so that a front that refuses has no connection left
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.kind == "cut" and self.command == "PUT":
            self.rfile.read(length // 2)
            return
        body = self.rfile.read(length)
        if fault is not None and fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault is not None and fault.kind != "cut":
            self.answer(
                fault.kind, {}, f"<Error><Code>{CODES[fault.kind]}</Code><Message>no</Message></Error>".encode()
            )
            return
        upstream = http.client.HTTPConnection(self.front.upstream, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        upstream.request(self.command, self.path, body=body or None, headers=headers)
        response = upstream.getresponse()
        data = response.read()
        upstream.close()
        if self.front.watch is not None:
            self.front.watch()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP}
        self.answer(response.status, kept, data, cut=fault is not None and fault.kind == "cut")

    def answer(self, status: int, headers: Mapping[str, str], data: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name in headers}:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Says nothing."""
