"""Runs of the deployments of ``deploy/prefect.yaml`` on a server of the test: started, watched, read back."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, LogFilter
from prefect.client.schemas.objects import FlowRun, Log, State, TaskRun

from flows.config import CompressConfig
from tests.commands import command_of
from tests.prefect_server import ROOT, Program, Server, serving, until

POOL = "lsp-test"
DEPLOY = ROOT / "deploy"
HEARTBEAT, SILENCE = 30, 75  # seconds: the least that Prefect takes; until a run without heartbeats is given away
AT_ONCE = 8
IDENTIFIER = re.compile(r"UUID: ([0-9a-f-]{36})")


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What ``prefect deployment run ... --watch`` came to; ``run`` is None where the API refused it."""

    status: int
    printed: str
    run: UUID | None


@dataclass(kw_only=True)
class Deployed:
    """A server with a worker, and everything of ``deploy/`` on it; ``folder`` is for what its runs write."""

    server: Server
    client: SyncPrefectClient
    folder: Path
    worker: Program

    def config(self, name: str, tiny: Callable[..., CompressConfig], **changes: Any) -> CompressConfig:
        """Returns a configuration whose store and output are in a folder called ``name``."""
        return tiny(self.folder / name, **changes)

    def watch(self, deployment: str, config: dict[str, Any]) -> Watched:
        """Does what a CI job does: runs a deployment and waits for its end."""
        given = ("--params", json.dumps({"config": config}), "--watch", "--watch-interval", "1")
        status, printed = self.server.run("deployment", "run", deployment, *given)
        found = IDENTIFIER.search(printed)
        return Watched(status=status, printed=printed, run=None if found is None else UUID(found[1]))

    def submit(self, deployment: str, config: CompressConfig) -> UUID:
        """Does what the form of the UI does: creates a run for whichever worker comes."""
        found = self.client.read_deployment_by_name(deployment)
        parameters = {"config": config.model_dump(mode="json")}
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def run(self, identifier: UUID) -> FlowRun:
        return self.client.read_flow_run(identifier)

    def state(self, identifier: UUID) -> State:
        state = self.run(identifier).state
        assert state is not None
        return state

    def running(self, identifier: UUID) -> bool:
        """Whether a run has not ended. Errors: ``AssertionError`` if it has."""
        assert not self.state(identifier).is_final(), self.story(identifier)
        return True

    def finished(self, identifiers: Sequence[UUID], look: Callable[[], None] = lambda: None) -> list[State]:
        """Returns the final states of runs, once all have one; ``look`` is called again and again meanwhile."""

        def final() -> bool:
            look()
            return all(self.state(one).is_final() for one in identifiers)

        until(final, lambda: "\n".join(self.story(one) for one in identifiers))
        return [self.state(one) for one in identifiers]

    def completed(self, identifier: UUID) -> None:
        """Returns once a run that was given away has completed: it is ``Crashed`` for a moment in between."""

        def whole() -> bool:
            state = self.state(identifier)
            assert not state.is_failed(), self.story(identifier)
            return state.is_completed()

        until(whole, lambda: self.story(identifier))

    def stages(self, identifier: UUID) -> list[TaskRun]:
        """Returns the stages of a run, of every attempt, as the UI shows them."""
        only = FlowRunFilter.model_validate({"id": {"any_": [identifier]}})
        return self.client.read_task_runs(flow_run_filter=only, limit=200)

    def states(self, identifier: UUID) -> list[str]:
        """Returns the names of the states that a run has had."""
        return [state.name or "" for state in self.client.read_flow_run_states(identifier)]

    def log(self, identifier: UUID) -> list[Log]:
        only = LogFilter.model_validate({"flow_run_id": {"any_": [identifier]}})
        return self.client.read_logs(only, limit=200)

    def story(self, identifier: UUID) -> str:
        """Returns what a reader of a failed test wants to know of a run."""
        lines = [f"{self.run(identifier).name}: {self.states(identifier)}, {self.state(identifier).message}"]
        lines += [line.message for line in self.log(identifier) if line.level >= logging.WARNING]
        return "\n".join([*lines, self.worker.log.read_text()[-4000:]])

    def kill_worker(self) -> list[psutil.Process]:
        """Ends the worker and its runs as a loss of power does; returns the processes."""
        return self.worker.kill()

    def restart_worker(self) -> None:
        self.worker = self.server.worker(POOL, limit=AT_ONCE)

    def below_worker(self) -> list[psutil.Process]:
        """Returns every process that the worker has started, wherever it hangs."""
        own = {program.process.pid for program in self.server.programs}
        return [process for process in self.server.below() if process.pid not in own]


@contextmanager
def deployed(folder: Path) -> Iterator[Deployed]:
    """Starts a server and a worker, deploys what ``deploy/`` has, and ends everything."""
    variables = {
        "LSP_HOME": str(ROOT),
        "LSP_STORE": str(folder / "store"),
        "LSP_OUTPUT": str(folder / "runs"),
        "PREFECT_DEFAULT_WORK_POOL_NAME": POOL,
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT),
    }
    with serving(variables) as server, server.client() as client:
        worker = server.worker(POOL, limit=AT_ONCE)  # makes the work pool
        for arguments in (
            ("deploy", "--all", "--prefect-file", str(DEPLOY / "prefect.yaml")),
            ("automation", "create", "--from-json", json.dumps(_quicker(DEPLOY / "automations.yaml"))),
        ):
            status, printed = server.run(*arguments)
            assert status == 0, printed
        yield Deployed(server=server, client=client, folder=folder, worker=worker)


def _quicker(path: Path) -> list[dict[str, Any]]:
    """Returns the automations of a file, those that wait for silence with less patience."""
    automations: list[dict[str, Any]] = yaml.safe_load(path.read_text())["automations"]
    for one in automations:
        if one["trigger"]["posture"] == "Proactive":
            assert timedelta(seconds=one["trigger"]["within"]) >= 3 * timedelta(seconds=180)  # Prefect's heartbeat
            one["trigger"]["within"] = SILENCE
    return automations


def gone(processes: Callable[[], list[psutil.Process]], seconds: float) -> list[str]:
    """Returns the command lines of those ``processes`` that are still there after so many seconds."""
    limit = time.monotonic() + seconds
    while (left := processes()) and time.monotonic() < limit:
        time.sleep(0.2)
    return [" ".join(command_of(one)) for one in left if one.is_running()]
