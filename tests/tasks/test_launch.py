"""Training on several processes of one node: real torchrun, real kills. Several nodes, and the flow: tests/flows.

A step of the tiny model takes milliseconds, a process seconds to import what it needs: hence few and long tests.
"""

import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lsp_core.durable import DamagedFileError
from lsp_core.gram import NonFiniteError
from storage.digest import digest_folder
from storage.faults import StoreFull, is_full
from storage.store import Store
from storage.tensors import load_tensors
from tasks.artifacts import read_json
from tasks.caching import Launch
from tasks.launch import ProcessesFailed, Told, check_launch
from tasks.models import ModelSource
from tasks.relay import MARK, understood
from tasks.train import train
from tests.tasks.training_inputs import SETTINGS, STEPS, arguments, work_in, workers

TWO = Launch(num_processes=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the stage is called with, and what it publishes uninterrupted, alone and on two processes."""

    store: Store
    arguments: dict[str, Any]
    alone: Path
    together: Path


@pytest.fixture(scope="module")
def case(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("launch")
    store = Store(str(folder / "store"))
    given = arguments(store, source, folder / "inputs")
    alone = work_in(folder / "alone", store, Launch())
    train.function(alone, **given, **SETTINGS)
    together = work_in(folder / "together", store, TWO)
    train.function(together, **given, **SETTINGS)
    assert together.steps == list(range(1, STEPS + 1))
    return Case(store=store, arguments=given, alone=alone.output, together=together.output)


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(case: Case) -> None:
    """The same sums in another order, in float32: 24 steps of 1e-2 at most, each off by some 1e-6 of itself.

    Adam normalizes: an entry whose gradient is rounding alone may go the other way, so that only means are compared.
    """
    alone, together = load_tensors(case.alone), load_tensors(case.together)
    assert list(alone) == list(together)
    for name, v in alone.items():
        assert (v - together[name]).abs().mean() <= 1e-5
    records = [read_json(path / "training.json") for path in (case.alone, case.together)]
    assert records[0]["settings"] == records[1]["settings"]
    for one, two in zip(*(record["history"] for record in records), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_the_result_is_the_same(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    killed: list[psutil.Process] = []

    def kill(step: int) -> None:
        if step == 10 and not killed:
            killed.extend(workers())
            killed[-1].kill()

    work = work_in(tmp_path, case.store, TWO, kill)
    train.function(work, **case.arguments, **SETTINGS)
    assert len(killed) == 2
    assert digest_folder(work.output) == digest_folder(case.together)
    (said,) = [line for line in caplog.messages if "started again" in line]
    at = int(said.partition("continues at step ")[2].split()[0])
    assert at >= 9  # a checkpoint follows each step
    assert said == f"train: started again (restart 1 of 3 at most), continues at step {at} of {STEPS}"
    assert not workers()


@pytest.mark.slow
def test_processes_that_die_too_often_end_in_one_line_and_the_next_run_continues(case: Case, tmp_path: Path) -> None:
    def kill(step: int) -> None:
        if step == 8:
            workers()[0].kill()

    chosen = TWO.model_copy(update={"max_restarts": 0})
    work = work_in(tmp_path, case.store, chosen, kill)
    with pytest.raises(ProcessesFailed, match=r"train: a process failed 1 times.*SIGKILL.*memory.*continues") as caught:
        train.function(work, **case.arguments, **SETTINGS)
    assert "\n" not in str(caught.value)
    assert not workers()
    later = work_in(tmp_path, case.store, Launch())  # on another number of processes
    train.function(later, **case.arguments, **SETTINGS)
    assert later.steps[0] >= 8
    for name, v in load_tensors(case.alone).items():
        assert (v - load_tensors(later.output)[name]).abs().mean() <= 1e-5


@pytest.mark.slow
def test_an_error_that_would_come_again_is_raised_here_and_costs_no_restart(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = work_in(tmp_path, case.store, TWO)
    with pytest.raises(ValueError, match=r"lower the learning rate$"):
        train.function(work, **case.arguments, **SETTINGS | {"learning_rate": 1e30})
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # torchrun saw no failure


def test_an_error_is_told_as_what_it_is() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/disk/file")
    for error in (ValueError("v"), NonFiniteError("n"), StoreFull("f"), OSError("o"), full):
        told = Told.model_validate_json(Told.of(error).model_dump_json()).error()
        assert type(told) is type(error)
        assert str(error).split("'")[0] in str(told)
        assert is_full(told) == is_full(error)
    assert type(Told.of(DamagedFileError("d")).error()) is ValueError  # by the nearest of its kinds
    assert type(Told.of(PermissionError(errno.EACCES, "no", "/f")).error()) is PermissionError


@pytest.mark.parametrize(
    ("chosen", "device", "said"),
    [
        (Launch(num_processes=2), "cuda", "exceeds the 0 GPUs"),
        (Launch(num_processes=2), "cuda:1", "'cuda:1' is one device"),
        (Launch(num_nodes=2, rendezvous_endpoint="host:1"), "mps", "'mps' is one device"),
    ],
)
def test_processes_without_a_device_are_refused(
    monkeypatch: pytest.MonkeyPatch, chosen: Launch, device: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=said):
        check_launch(chosen, device)
    check_launch(Launch(), device)
    check_launch(chosen, "cpu")


def test_lines_of_others_are_not_taken_for_our_own() -> None:
    assert understood('\x1e{"done": 1, "total": 2, "values": {}}') == {"done": 1, "total": 2, "values": {}}
    for line in ("{}", f'{MARK}{{"done": 1', f"{MARK}[]", "", "Traceback"):
        assert understood(line) is None
