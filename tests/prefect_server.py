"""A Prefect server on PostgreSQL, its workers and its command line, in processes that go with the test."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectHTTPStatusError

from tests import postgres

ROOT = Path(__file__).parents[1]
SECONDS = 600.0  # until what is waited for must have come, on a busy machine
STARTED_BY = "LSP_TEST_STARTED_BY"  # a variable that marks every process below ours


@dataclass(frozen=True, kw_only=True)
class Program:
    """A process that runs beside the test, in a session of its own; what it prints is in ``log``."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> list[psutil.Process]:
        """Ends it and everything below it at once, as a machine does that loses power; returns what that was."""
        family = _family(self.process.pid)
        for one in family:
            one.suspend()  # so that none of them sees another one's end
        for one in family:
            one.kill()
        psutil.wait_procs(family, timeout=SECONDS)
        self.process.wait()
        return family


@dataclass(kw_only=True)
class Server:
    """A running server. ``environment``: what a process needs to talk to it, and the mark by which it is found."""

    url: str
    folder: Path
    environment: dict[str, str]
    mark: str
    programs: list[Program] = field(default_factory=list)

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Program:
        """Starts ``prefect ARGUMENTS`` in the background."""
        log = self.folder / f"{len(self.programs)}-{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *arguments],
                cwd=ROOT,
                env=self.environment | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.programs.append(Program(process=process, log=log))
        return self.programs[-1]

    def worker(self, pool: str, *, limit: int) -> Program:
        """Starts a process worker of ``pool`` and returns once it asks for work."""
        name = f"worker-{len(self.programs)}"
        options = ("--pool", pool, "--type", "process", "--limit", str(limit), "--name", name)
        worker = self.start("worker", "worker", "start", *options)
        with self.client() as client:

            def online() -> bool:
                assert worker.process.poll() is None, worker.log.read_text()
                try:
                    return any(one.name == name for one in client.read_workers_for_work_pool(pool))
                except PrefectHTTPStatusError:  # the first worker makes the pool
                    return False

            until(online, worker.log.read_text)
        return worker

    def run(self, *arguments: str) -> tuple[int, str]:
        """Runs ``prefect ARGUMENTS`` to its end; returns its exit status and what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.url)

    def below(self) -> list[psutil.Process]:
        """Returns every process that this server's workers and command lines have started, wherever it hangs."""
        found = []
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.environ().get(STARTED_BY) == self.mark and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def close(self) -> None:
        """Ends everything, asked for or not."""
        for one in self.below():
            with suppress(psutil.Error):
                one.kill()
        for program in self.programs:
            program.process.wait()


def until(condition: Callable[[], bool], what: Callable[[], str], pause: float = 0.2) -> None:
    """Returns as soon as ``condition`` holds. Errors: ``AssertionError`` with ``what()`` when the time is up."""
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit, what()
        time.sleep(pause)


@contextmanager
def serving(variables: Mapping[str, str]) -> Iterator[Server]:
    """Runs a server on an empty PostgreSQL database; ``variables`` are set in whatever talks to it."""
    folder = Path(tempfile.mkdtemp(prefix="lsp-prefect-"))
    url = f"http://127.0.0.1:{postgres.free_port()}/api"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    mark = f"{os.getpid()}-{folder.name}"
    server = Server(
        url=url,
        folder=folder,
        mark=mark,
        environment=clean
        | {
            STARTED_BY: mark,
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_API_URL": url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "1000",  # so that no line is broken
        }
        | dict(variables),
    )
    try:
        with postgres.serving() as database:
            try:
                address = httpx.URL(url)
                own = {"PREFECT_API_DATABASE_CONNECTION_URL": database}
                where = ("--host", str(address.host), "--port", str(address.port))
                started = server.start("server", "server", "start", *where, "--no-ui", environment=own)
                until(lambda: _healthy(url, started), started.log.read_text)
                yield server
            finally:
                server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _healthy(url: str, started: Program) -> bool:
    assert started.process.poll() is None, started.log.read_text()
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]
