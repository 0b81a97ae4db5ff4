"""What a run that fails, or takes too long, shows in Prefect: states, tries, one line that says what to do."""

import errno
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, Log, TaskRun
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

import tasks.running
from flows.operated import operated
from flows.server import worth_a_line
from storage.faults import StoreUnavailable
from tasks.caching import Runtime, Stage, Work
from tasks.running import Stages, StageTimeout

pytestmark = pytest.mark.usefixtures("prefect_server")
log = logging.getLogger("tasks.example")


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(tasks.running, "RETRY_DELAYS", [0.0, 0.0])
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: True, PREFECT_LOCAL_STORAGE_PATH: tmp_path / "storage"}):
        yield


def started(function: Callable[..., None], store: Path, minutes: float | None = None) -> tuple[FlowRun, Any]:
    """Runs a flow of the one stage that ``function`` computes; returns its run, and what the caller got."""

    @flow(name="one-stage", persist_result=False)
    @operated
    def one_stage() -> str:
        stages = Stages(place=str(store), runtime=Runtime(), timeout_minutes=minutes)
        return stages.run(Stage(function, 1, "example")).digest

    state = one_stage(return_state=True)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(str(state.state_details.flow_run_id)))
    return run, state.result(raise_on_failure=False)


def task_run(run: FlowRun) -> TaskRun:
    """Returns the only task run of a flow run, as soon as the server knows how it ended."""
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
    limit = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while time.monotonic() < limit:
            found = client.read_task_runs(flow_run_filter=wanted)
            if found and found[0].state is not None and found[0].state.is_final():
                (only,) = found
                return only
            time.sleep(0.1)
    raise AssertionError("no task run ended")


def logged(run: FlowRun, until: str) -> list[Log]:
    """Returns the log of a run as the UI has it, once it holds ``until``."""
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
    limit = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while time.monotonic() < limit:
            found = sorted(client.read_logs(wanted), key=lambda record: record.timestamp)
            if any(until in record.message for record in found):
                return found
            time.sleep(0.1)
    raise AssertionError(f"nothing says {until!r}")


def left_over(store: Path) -> list[str]:
    """Returns what Prefect wrote of a result: in the store, and where it keeps results by default."""
    places = [store / "results", Path(PREFECT_LOCAL_STORAGE_PATH.value())]
    stray = [path.name for path in store.iterdir() if path.is_file()]
    return stray + [str(path) for place in places if place.exists() for path in place.rglob("*") if path.is_file()]


def test_a_wrong_value_fails_at_once_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(work: Work) -> None:
        log.info("reading the text")
        raise ValueError("evaluation.text: there is no such file: name one that is there")

    line = "error: evaluation.text: there is no such file: name one that is there"
    run, error = started(wrong, tmp_path / "store")
    assert isinstance(error, ValueError)
    assert (run.state_name, run.state.message if run.state else "") == ("Failed", line)
    failed = task_run(run)
    assert (failed.state_name, failed.run_count) == ("Failed", 1)
    records = logged(run, line)
    serious = [record.message for record in records if record.level >= logging.WARNING]
    assert [message for message in serious if not message.startswith("Finished in state")] == [line]
    assert not any("Traceback" in record.message for record in records)
    ours = {record.message: record for record in records if not record.name.startswith("prefect")}
    assert ours["reading the text"].task_run_id == failed.id
    assert ours["example: computing (none like it in the store)"].task_run_id is None
    assert "serialize" not in caplog.text
    assert left_over(tmp_path / "store") == []


def test_a_failure_of_the_store_is_tried_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def flaky(work: Work) -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise OSError(errno.EIO, "input/output error", "s3://bucket/grid")
        (work.output / "value").write_text("7")

    run, digest = started(flaky, tmp_path / "store")
    assert (run.state_name, len(digest), calls) == ("Completed", 64, [0, 1, 2])
    ended = task_run(run)
    assert (ended.state_name, ended.run_count) == ("Completed", 3)


def test_a_store_that_stays_away_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def away(work: Work) -> None:
        raise StoreUnavailable("store 's3://b': read failed 5 times: run the same command again once the store answers")

    run, error = started(away, tmp_path / "store")
    assert isinstance(error, StoreUnavailable)
    assert task_run(run).run_count == 3
    records = logged(run, "error: store 's3://b'")
    (told,) = [record.message for record in records if record.message.startswith("error: ")]
    assert told.endswith("run the same command again once the store answers")
    assert not any("Traceback" in record.message for record in records)
    assert "serialize" not in caplog.text


def test_an_unforeseen_error_has_its_traceback_after_the_line(tmp_path: Path) -> None:
    def broken(work: Work) -> None:
        raise KeyError("units")

    run, error = started(broken, tmp_path / "store")
    assert isinstance(error, KeyError)
    line = (
        "error: 'units': an unforeseen KeyError, its traceback is in the log; what is finished is kept, the same run "
        "goes on from there"
    )
    assert run.state is not None
    assert run.state.message == line
    records = [record.message for record in logged(run, "where it happened") if record.level >= logging.ERROR]
    ended, said, where, *_ = records
    assert ended.startswith("Finished in state")  # of the task
    assert said == line
    assert where.startswith("where it happened:\nTraceback")
    assert task_run(run).run_count == 1


def test_a_stage_that_takes_too_long_is_ended_and_gone_on_from(tmp_path: Path) -> None:
    seen: list[int] = []

    def long(work: Work) -> None:
        path = work.scratch / "steps"
        done = int(path.read_text()) if path.exists() else 0
        seen.append(done)
        x = torch.eye(256)
        for step in range(done, 40):
            for _ in range(20):
                x = x @ x
            time.sleep(0.05)
            path.write_text(str(step + 1))
        (work.output / "value").write_text("7")

    began = time.monotonic()
    run, error = started(long, tmp_path / "store", minutes=0.5 / 60)
    assert time.monotonic() - began < 20  # half a second, and Prefect's start of a run on a busy machine
    assert isinstance(error, StageTimeout)
    assert run.state_name == "TimedOut"
    assert run.state is not None
    assert run.state.message == (
        "error: example took longer than stage_timeout_minutes=0.00833333: its work is kept; raise the setting and run "
        "again, it goes on from there"
    )
    ended = task_run(run)
    assert (ended.state_name, ended.run_count) == ("TimedOut", 1)
    again, digest = started(long, tmp_path / "store", minutes=5)
    assert (again.state_name, len(digest)) == ("Completed", 64)
    assert seen[0] == 0
    assert 0 < seen[1] < 40


def test_the_terminal_has_no_line_twice() -> None:
    def shown(name: str, message: str) -> bool:
        return worth_a_line(logging.LogRecord(name, logging.ERROR, "", 0, message, (), None))

    assert not shown("prefect.flow_runs", "error: there is no such file")  # main prints it
    assert not shown("prefect.task_runs", "Finished in state Failed('...')")
    assert shown("tasks.running", "error: of ours")
    assert shown("prefect.flow_runs", "Beginning flow run")
