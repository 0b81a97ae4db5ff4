"""Real clusters of two workers on this machine: a worker that is killed while it measures costs its own rows only."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import prefect
import psutil
import pytest
import yaml

from flows.config import CompressConfig
from flows.curve import measure_curve
from tests.commands import command_of
from tests.flows.processes import Run, digests
from tests.tasks.training_inputs import gone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]
Make = Callable[..., CompressConfig]

POINTS = 3  # of the curve
ROWS = 8
WORKERS = {"dask": "multiprocessing.spawn", "ray": "ray::measure part"}  # how their processes are called


@pytest.fixture(scope="module")
def make(tiny_config: Make) -> Make:
    """Returns a maker of configurations whose grid takes some seconds."""

    def slow(folder: Path, **changes: object) -> CompressConfig:
        return tiny_config(folder, allocation={"sequences": 16, "grid_points": 33}, micro_batch=1, **changes)

    return slow


@pytest.fixture(scope="module")
def alone(prefect_server: None, make: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the digests of a run that shares nothing out."""
    folder = tmp_path_factory.mktemp("alone")
    measure_curve(make(folder), POINTS)
    return digests(folder / "store")


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_a_worker_killed_while_it_measures_costs_its_own_rows(
    runner: str, make: Make, alone: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip(f"prefect_{runner}", reason=f"workers.runner={runner} is an extra of its own")
    config, store = make(tmp_path, workers={"runner": runner, "count": 2}), tmp_path / "store"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    server = {"PREFECT_API_URL": str(prefect.settings.PREFECT_API_URL.value())}
    run = Run(["-m", "flows", "curve", str(file), "--points", str(POINTS)], server)
    written: dict[int, set[int]] = {}  # by row: the inodes of its status; a row that is measured again has two

    def look() -> set[int]:
        for path in store.glob("work/*/grid/status/c/*/0"):
            try:
                written.setdefault(int(path.parent.name), set()).add(path.stat().st_ino)
            except FileNotFoundError:  # published just now
                continue
        return set(written)

    try:
        run.until(lambda: "gather" in run.done(), pause=0.1)  # the cluster is up
        run.until(lambda: min(look(), default=ROWS) < 4 <= max(look(), default=0), pause=0.02)  # both have measured
        victims = [
            process
            for process in psutil.Process(run.process.pid).children(recursive=True)
            if WORKERS[runner] in " ".join(command_of(process))
        ]
        assert len(victims) == 2, [command_of(process) for process in victims]
        os.kill(victims[0].pid, signal.SIGKILL)
        done = look()
        assert len(done) < ROWS
        while run.process.poll() is None:
            look()
            time.sleep(0.02)  # a row takes longer
        assert run.wait() == 0, run.text()
    finally:
        if run.process.poll() is None:
            run.kill()
    assert digests(store) == alone, run.text()
    assert all(len(inodes) == 1 for inodes in written.values()), written
    assert re.search(r"measure: \d parts, 2 workers", run.text())
    assert gone(victims)
