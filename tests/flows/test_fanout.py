"""Stages shared out to threads: the keys and the bytes of a run without, whatever becomes of the parts."""

import importlib.util
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

import tasks.measure
from flows.config import CompressConfig, WorkersConfig
from flows.graph import evaluate_dense, initialize
from flows.prepared import prepare
from flows.sets import draw
from flows.sets import test_examples as draw_test
from flows.task_runners import workers_of
from lsp_core.units import Unit
from tasks.caching import Share, Work
from tasks.measure import measure
from tasks.running import Stages
from tests.flows.processes import Run, digests, starting
from tests.flows.test_two_at_once import assert_one_copy, both

Make = Callable[..., CompressConfig]


@flow(persist_result=False)
def initial(config: CompressConfig) -> None:
    """Evaluates the dense model, gathers its Grams and measures its grid."""
    prepared = prepare(config)
    workers = workers_of(config.workers, prepared.device)
    stages = Stages(place=config.store, runtime=prepared.runtime, workers=workers)
    with workers:
        test = draw_test(stages, prepared)
        sets = draw(stages, prepared, test)
        evaluate_dense(stages, prepared, test)
        initialize(stages, prepared, sets)


def run(make: Make, folder: Path, count: int) -> dict[str, str]:
    """Returns the digests of the artifacts that ``count`` threads make."""
    initial(make(folder, workers={"count": count}))
    assert [path for path in (folder / "store" / "work").iterdir() if path.is_dir()] == []
    return digests(folder / "store")


@pytest.fixture(scope="module")
def alone(prefect_server: None, tiny_config: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the digests of a run that shares nothing out."""
    return run(tiny_config, tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_threads_gives_the_same_bytes(
    alone: dict[str, str], tiny_config: Make, tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert run(tiny_config, tmp_path, count) == alone
    for label in ("evaluate dense", "gather", "measure"):
        assert f"{label}: {count} parts, {count} workers" in caplog.text
    assert "failed" not in caplog.text
    caplog.clear()
    assert run(tiny_config, tmp_path, count) == alone
    assert "parts" not in caplog.text  # of what is in the store nothing is shared out


@pytest.mark.slow
def test_parts_that_fail_cost_their_own_work_alone(
    alone: dict[str, str],
    tiny_config: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert measure.parts is not None
    parts, rows = measure.parts, Counter[str]()

    def run_one(work: Work, share: Share, **arguments: Any) -> None:
        if "part 2" in work.label:
            raise RuntimeError("out of luck\nsecond line")
        parts.run(work, share, **arguments)

    def measured_row(measure: Any, unit: Unit, points: int) -> Any:
        rows[unit.name] += 1
        return original(measure, unit, points)

    original = tasks.measure.measured_row
    monkeypatch.setattr(tasks.measure, "measured_row", measured_row)
    monkeypatch.setattr(measure, "parts", replace(parts, run=run_one))
    assert run(tiny_config, tmp_path, 2) == alone
    assert list(rows.values()) == [1] * 8  # nothing is measured again
    assert "measure part 2 of 2 failed (out of luck): the stage does what is left of it" in caplog.text


@pytest.mark.slow
def test_two_runs_at_once_with_workers_leave_one_copy(
    prefect_server: None, alone: dict[str, str], tiny_config: Make, tmp_path: Path
) -> None:
    outputs = [tmp_path / name for name in ("one", "two")]
    configs = [tiny_config(tmp_path, output=output, workers={"count": 2}) for output in outputs]
    with starting(tmp_path) as start:
        runs: list[Run] = [start(config) for config in configs]
        written = both(runs, tmp_path / "store")
    assert_one_copy(tmp_path / "store")
    kept = digests(tmp_path / "store")
    assert {name: kept[name] for name in alone} == alone
    assert {len(written[name]) for name in alone} == {1}
    assert all(" failed (" not in run.text() for run in runs)


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_a_runner_that_is_not_installed_names_the_extra(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("flows.task_runners.find_spec", lambda name: None if "prefect_" in name else found(name))
    with pytest.raises(ValueError, match=rf"^workers.runner={runner} needs .*: pip install 'lsp\[{runner}\]'$"):
        workers_of(WorkersConfig(runner=runner, count=2), "cpu")


@pytest.mark.parametrize(("runner", "scheme"), [("dask", "tcp://"), ("ray", ""), ("ray", "ray://")])
def test_an_address_where_nothing_listens_is_told_at_once(runner: Any, scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens there
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        workers = workers_of(WorkersConfig(runner=runner, count=2, address=address), "cpu")
        with pytest.raises(ConnectionError, match=f"nothing answers at {address}: "), workers._make():
            pytest.fail("somebody is there")


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the names of the modules imported meanwhile."""
    names: list[str] = []
    original = __import__

    def noted(name: str, *rest: Any) -> Any:
        names.append(name)
        return original(name, *rest)

    monkeypatch.setattr("builtins.__import__", noted)
    return names


@pytest.mark.parametrize("runner", ["threads", "dask", "ray"])
def test_nothing_is_imported_or_started_before_there_is_work(runner: str, imported: list[str]) -> None:
    with workers_of(WorkersConfig(runner=runner, count=2), "cpu"):
        pass
    assert not {"prefect_dask", "prefect_ray", "ray", "distributed"} & set(imported)
