"""Training on several processes and nodes, by the flow and by ``flows join``: real processes, on loopback."""

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.cli import BAD_INPUT, main
from flows.compress import compress
from flows.config import CompressConfig
from flows.prepared import prepare
from storage.store import Store
from storage.tensors import load_tensors
from tasks import elastic, train_worker
from tasks.caching import Launch
from tasks.launch import ProcessesFailed, TrainingSpec
from tasks.models import find_model
from tasks.train import train
from tests.commands import command_of
from tests.flows.processes import Run, starting, trained_steps
from tests.tasks.training_inputs import SETTINGS, STEPS, arguments, below, gone, work_in, workers

Make = Callable[..., CompressConfig]
Start = Callable[[CompressConfig], Run]
MULTI = {"epochs": 2, "batch_sequences": 8, "num_processes": 2}


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def stages(report: dict[str, Any], name: str | None = None) -> list[tuple[str, str]]:
    return [(stage["key"], stage["state"]) for stage in report["stages"] if name in (None, stage["name"])]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_two_processes_make_the_artifact_of_one(tiny_config: Make, tmp_path: Path) -> None:
    """Perplexities and KLs agree to 1e-5 of themselves: float32 sums in another order, through 4 steps of Adam."""
    targets = [{"ratio": 0.3, "objective": "task"}]
    one = compress(tiny_config(tmp_path / "one", targets=targets))
    two = compress(tiny_config(tmp_path / "two", targets=targets, training=MULTI))
    assert [key for key, _ in stages(one, "train")] == [key for key, _ in stages(two, "train")]
    for first, second in zip(one["results"], two["results"], strict=True):
        assert first["best_epoch"] == second["best_epoch"] > 0
        assert second["perplexity"] == pytest.approx(first["perplexity"], rel=1e-5)
        for epochs in zip(first["history"], second["history"], strict=True):
            assert epochs[1] == pytest.approx(epochs[0], rel=1e-5)
    again = compress(tiny_config(tmp_path / "two", targets=targets, training=MULTI | {"num_processes": 1}))
    assert {state for _, state in stages(again)} == {"Cached"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as run:
        yield run


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_cancelled_and_a_killed_flow_leave_no_process_and_the_next_continues(
    start: Start, tiny_config: Make, tmp_path: Path
) -> None:
    calibration = tiny_config(tmp_path).calibration.model_dump() | {"sequences": 128}
    training = MULTI | {"checkpoint_steps": 1, "dropout": 0.2, "epochs": 8}
    config = tiny_config(tmp_path, calibration=calibration, training=training, micro_batch=1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        run = start(config)
        process = psutil.Process(run.process.pid)
        run.until(lambda: len(workers(process)) == 2, pause=0.1)  # noqa: B023
        torchrun = [one for one in below(process) if "tasks.agent" in command_of(one)]
        seen = torchrun + workers(process)
        before = trained_steps(tmp_path / "store")
        run.until(lambda: trained_steps(tmp_path / "store") > before, pause=0.05)  # noqa: B023
        process.send_signal(number)
        run.wait()
        assert run.process.returncode != 0
        assert gone(seen), run.text()
        assert not (tmp_path / "output" / "report.json").exists()
    kept = trained_steps(tmp_path / "store")
    last = start(config)
    assert last.wait() == 0, last.text()
    assert f"continues at step {kept} of" in last.text(), last.text()


@pytest.fixture(scope="module")
def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nodes")
    store = Store(str(folder / "store"))
    return store, arguments(store, find_model(str(tiny_model)), folder / "inputs")


@pytest.mark.slow
def test_two_nodes_train_together(
    stage: tuple[Store, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torchrun numbers nodes by their addresses: here the joining one, 127.0.0.1, comes before localhost."""
    caplog.set_level(logging.INFO)
    store, given = stage
    at = endpoint()
    joining = Run(["-m", "flows", "join", at, "--trainings", "1"])
    alone = work_in(tmp_path / "alone", store, Launch())
    train.function(alone, **given, **SETTINGS)
    together = work_in(tmp_path / "together", store, Launch(num_nodes=2, rendezvous_endpoint=at))
    train.function(together, **given, **SETTINGS)
    assert together.steps == list(range(1, STEPS + 1))  # the leader, which tells them, is on the stage's node
    one, two = load_tensors(alone.output), load_tensors(together.output)
    assert all((v - two[name]).abs().mean() <= 1e-5 for name, v in one.items())
    assert f"on each of them run: python -m flows join {at} --num-processes 1" in caplog.text
    assert joining.wait() == 0, joining.text()
    assert "joins with 1 processes" in joining.text()
    assert list(together.scratch.glob("*.tmp")) == []


@pytest.mark.slow
def test_nodes_that_do_not_come_end_in_one_line(
    stage: tuple[Store, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "JOIN_SECONDS", 3)
    store, given = stage
    at = endpoint()
    work = work_in(tmp_path, store, Launch(num_nodes=2, rendezvous_endpoint=at))
    with pytest.raises(ProcessesFailed, match=f"2 nodes did not meet at {at}.*python -m flows join {at}") as caught:
        train.function(work, **given, **SETTINGS)
    assert "\n" not in str(caught.value)


def test_joining_where_nobody_waits_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    at = endpoint()
    assert main(["join", at, "--wait-minutes", "0.01"]) == BAD_INPUT
    assert f"error: {at}: no training waited there for 0.01 minutes" in capsys.readouterr().err
    assert main(["join", "nowhere"]) == BAD_INPUT


def test_a_node_without_the_folder_is_told_so(
    stage: tuple[Store, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_worker, "SEE_SECONDS", 0.0)
    store, given = stage
    work = work_in(tmp_path, store, Launch())
    spec = TrainingSpec(
        place=store.place,
        verify=False,
        key=None,
        label="train",
        runtime=work.runtime,
        output=work.output,
        scratch=work.scratch,
        marker=work.scratch / "not-there.tmp",
        told=tmp_path / "told.json",
        model=given["model"],
        inputs={},
        settings=SETTINGS,
    )
    assert TrainingSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValueError, match=r"does not see .*scratch.*all nodes share") as caught:
        train_worker.load(spec, train_worker.Group(rank=1, size=2), here=False)
    elsewhere = train_worker.portable(caught.value, here=False)
    assert str(elsewhere) == f"node {socket.gethostname()}: {caught.value}"


def test_more_processes_than_sequences_of_a_step_are_refused(tiny_config: Make, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, training={"batch_sequences": 2, "num_processes": 3})
    with pytest.raises(ValueError, match="batch_sequences=2 leaves some of 1 x 3 processes without a sequence: lower"):
        prepare(config)
