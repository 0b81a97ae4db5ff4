"""A run that a worker's process executes, cancelled from outside in a long stage: it ends, and another one goes on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from flows.compress import compress
from flows.config import CompressConfig
from storage.grid import KLGrid
from tests.flows.processes import ROOT, SECONDS, digests, measured_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]
Make = Callable[..., CompressConfig]


class Executed:
    """A flow run and ``prefect flow-run execute``, what a container runs; a process worker starts it the same way."""

    def __init__(self, client: SyncPrefectClient, run: FlowRun) -> None:
        self.client, self.id = client, run.id
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "flow-run", "execute", str(run.id)],
            cwd=ROOT,
            env=os.environ | {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns as soon as ``condition`` holds. Errors: ``AssertionError`` if the run ends first or time is up."""
        limit = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.01)

    def cancel(self) -> str:
        """Does what the UI's button does; returns what the processes printed, all of which are gone."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        assert below  # the flow's own process at least
        self.client.set_flow_run_state(self.id, Cancelling())
        printed, _ = self.process.communicate(timeout=SECONDS)
        _, alive = psutil.wait_procs(below, timeout=30)
        assert not alive
        return printed

    def read(self) -> FlowRun:
        return self.client.read_flow_run(self.id)

    def log(self) -> list[str]:
        """Returns the run's log as the UI has it."""
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[self.id]))
        return [record.message for record in self.client.read_logs(wanted)]


@pytest.fixture
def execute() -> Iterator[Callable[[CompressConfig], Executed]]:
    """Yields a function that runs the flow ``compress`` as a deployment does; no run outlives the test."""
    started: list[Executed] = []
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(
            flow_id=client.create_flow(compress),
            name="cancelled",
            entrypoint="flows.compress:compress",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
        )

        def start(config: CompressConfig) -> Executed:
            parameters: dict[str, Any] = {"config": config.model_dump(mode="json")}
            started.append(Executed(client, client.create_flow_run_from_deployment(deployment, parameters=parameters)))
            return started[-1]

        yield start
        for run in started:
            if run.process.poll() is None:
                for process in [*psutil.Process(run.process.pid).children(recursive=True), run.process]:
                    process.kill()
                run.process.wait()


@pytest.fixture
def config(tiny_config: Make, tmp_path: Path) -> CompressConfig:
    """Returns a configuration whose rows take long enough to be cancelled between two of them."""
    base = tiny_config(tmp_path)
    return tiny_config(
        tmp_path,
        calibration=base.calibration.model_dump() | {"sequences": 128},
        allocation={"sequences": 96},
        training={"epochs": 1, "batch_sequences": 64},
        micro_batch=1,
    )


def test_a_cancelled_run_ends_as_cancelled_and_the_next_goes_on(
    execute: Callable[[CompressConfig], Executed], config: CompressConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(config.store)
    first = execute(config)
    first.until(lambda: len(measured_rows(store)) >= 3)
    printed = first.cancel()
    assert first.read().state_name == "Cancelled", printed
    assert "Flow run was cancelled." in printed  # Python was unwound, not killed
    log = first.log()
    assert any(line.startswith("measure: computing (") for line in log)
    assert not any(line.startswith("error: ") for line in log)
    done, before = measured_rows(store), digests(store)
    assert len(done) >= 3
    assert not list(store.glob("manifest/measure/*"))

    written: list[int] = []
    write_row = KLGrid.write_row

    def counted(self: KLGrid, unit: int, *row: Any) -> None:
        written.append(unit)
        write_row(self, unit, *row)

    monkeypatch.setattr(KLGrid, "write_row", counted)
    report = compress(config)
    assert sorted(written + done) == list(range(len(report["units"])))  # every row once
    states = {stage["label"]: stage for stage in report["stages"]}
    assert {states[label]["state"] for label in ("calibrate training", "gather", "bases")} == {"Cached"}
    assert states["measure"]["reason"].endswith("goes on from an unfinished run")
    assert before.items() <= digests(store).items()
    assert not [path for path in (store / "work").iterdir() if path.is_dir()]
