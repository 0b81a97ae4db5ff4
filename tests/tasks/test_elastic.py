"""However whoever started torchrun ends, nothing that it started survives: real processes, whose workers are light."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tasks import elastic
from tasks.agent import killed
from tasks.elastic import Ended, Meeting, run_elastic
from tasks.launch import explain
from tests.commands import command_of
from tests.tasks.training_inputs import ROOT, below, gone, until

pytestmark = pytest.mark.slow
ALONE = Meeting(id="test", endpoint=None, num_nodes=1, max_restarts=0)
Start = Callable[[str], psutil.Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts a runner and returns when its two workers have begun."""
    started: list[psutil.Process] = []

    def begin(do: str) -> psutil.Process:
        command = [sys.executable, "-m", "tests.tasks.elastic_runner", str(tmp_path), do]
        process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started.append(process)
        until(lambda: (tmp_path / "began").exists() and len(below(process)) == 3)
        return process

    yield begin
    for process in started:
        if process.is_running():
            process.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 3), (signal.SIGINT, 4), (signal.SIGKILL, -9)])
def test_nothing_survives_whoever_started_it(start: Start, number: signal.Signals, status: int) -> None:
    process = start("sleep")
    left = below(process)
    process.send_signal(number)
    assert process.wait(30) == status
    assert gone(left)


def test_a_worker_that_is_deaf_to_sigterm_is_killed(start: Start) -> None:
    process = start("stubborn")
    left = below(process)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3
    assert gone(left)
    assert elastic.SHUTDOWN_SECONDS <= time.monotonic() - began < elastic.GRACE_SECONDS


def test_a_torchrun_that_is_killed_leaves_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[psutil.Process] = []

    def kill(*_: object) -> None:
        for agent in (process for process in below() if "tasks.agent" in command_of(process)):
            started = below(agent)
            if len(started) == 2 and not found:
                found.extend([agent, *started])
                agent.kill()

    ended = light(monkeypatch, tmp_path, "sleep", on_progress=kill)
    assert ended.status == -signal.SIGKILL
    assert len(found) == 3
    assert gone(found)


def test_the_end_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps: list[tuple[object, ...]] = []
    assert light(monkeypatch, tmp_path, "finish", on_progress=lambda *told: steps.append(told)).status == 0
    assert steps == [(1, 2, {})] * 2
    ended = light(monkeypatch, tmp_path, "fail")
    assert ended.status == 1
    assert any("RuntimeError: no such luck" in line for line in ended.last)
    said = explain("train", ALONE, ended)
    assert said.startswith("train: a process failed 1 times, in the end by: RuntimeError: no such luck: see the lines")
    assert "\n" not in said


def test_a_process_that_was_killed_is_named_not_those_that_lost_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = light(monkeypatch, tmp_path, "bereave")
    assert ended.status == 1
    said = explain("train", ALONE, ended)
    assert re.match(
        r"train: a process failed 1 times, in the end by: Signal 9 \(SIGKILL\) received by PID \d+: lower", said
    )


def test_what_torchrun_killed_itself_is_no_cause(tmp_path: Path) -> None:
    """It sends SIGTERM, and SIGKILL so many seconds later to what is deaf to it."""
    path = tmp_path / "error.json"

    def failures(age: float, number: int) -> ChildFailedError:
        path.write_text(json.dumps({"message": "RuntimeError: first", "timestamp": str(int(time.time() - age))}))
        first = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
        ended = ProcessFailure(local_rank=1, pid=2, exitcode=-number, error_file=str(tmp_path / "none"))
        return ChildFailedError("train", {0: first, 1: ended})

    assert killed(failures(elastic.SHUTDOWN_SECONDS, signal.SIGKILL)) is None
    assert killed(failures(0, signal.SIGTERM)) is None
    assert killed(failures(1, signal.SIGKILL)) == "Signal 9 (SIGKILL) received by PID 2"
    assert killed(failures(1, signal.SIGBUS)) == "Signal 7 (SIGBUS) received by PID 2"


def light(monkeypatch: pytest.MonkeyPatch, folder: Path, do: str, **options: object) -> Ended:
    monkeypatch.setattr(elastic, "WORKER", "tests.tasks.elastic_worker")
    return run_elastic(ALONE, 2, [do], folder, hosts=True, **options)  # type: ignore[arg-type]
