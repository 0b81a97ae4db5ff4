"""``python -m flows compress``, killed or interrupted in a long stage: the same command continues to the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prefect
import pytest
import yaml
from safetensors import SafetensorError, safe_open

from flows.config import CompressConfig
from storage.digest import digest_folder
from storage.grid import KLGrid

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]
Make = Callable[..., CompressConfig]

ROOT = Path(__file__).parents[2]
SECONDS = 240.0  # until a run must have come as far as it is waited for


class Run:
    """One ``python -m flows compress`` in a process and a process group of its own."""

    def __init__(self, config: Path, log: Path) -> None:
        settings = {"PREFECT_API_URL": str(prefect.settings.PREFECT_API_URL.value()), "OMP_NUM_THREADS": "1"}
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows", "compress", str(config)],
                cwd=ROOT,
                env=os.environ | settings,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> int:
        return self.process.wait(timeout=SECONDS)

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns as soon as ``condition`` holds. Errors: ``AssertionError`` if the process ends first, or in time."""
        limit = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < limit, self.log.read_text()
            time.sleep(0.002)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)  # as a terminal does


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Returns a function that starts a run; none of them outlives the test."""
    runs: list[Run] = []

    def run(config: CompressConfig) -> Run:
        path = tmp_path / f"{len(runs)}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        runs.append(Run(path, tmp_path / f"{len(runs)}.log"))
        return runs[-1]

    yield run
    for started in runs:
        if started.process.poll() is None:
            started.kill()


@pytest.fixture
def config(tiny_config: Make) -> Callable[[Path], CompressConfig]:
    """Returns a maker of configurations whose rows and steps take long enough to be killed between two of them."""
    base = tiny_config(Path("unused"))
    return lambda folder: tiny_config(
        folder,
        calibration=base.calibration.model_dump() | {"sequences": 128},
        allocation={"sequences": 96},
        training={"epochs": 2, "batch_sequences": 8, "checkpoint_steps": 1, "dropout": 0.2},
        micro_batch=1,
    )


def measured_rows(store: Path) -> list[int]:
    """Returns the rows that a running ``measure`` has finished."""
    return sorted(int(path.parent.name) for path in store.glob("work/*/grid/status/c/*/0"))


def trained_steps(store: Path) -> int:
    """Returns the optimizer steps in the checkpoint of a running ``train``."""
    for path in store.glob("work/*/checkpoint/training.safetensors"):
        try:
            with safe_open(path, framework="np") as file:
                return int(json.loads(file.metadata()["state"])["step"])
        except (FileNotFoundError, SafetensorError):  # the stage ended meanwhile
            continue
    return 0


def manifests(store: Path) -> dict[str, dict[str, Any]]:
    """Returns what the store holds: the manifest of every artifact by stage and key."""
    return {
        path.relative_to(store / "manifest").as_posix(): json.loads(path.read_text())
        for path in store.glob("manifest/*/*.json")
    }


def payload(store: Path, kind: str) -> Path:
    (digest,) = {m["digest"] for name, m in manifests(store).items() if name.startswith(f"{kind}/")}
    return store / "payload" / digest


def states(folder: Path, *names: str) -> list[str]:
    report = json.loads((folder / "output" / "report.json").read_text())
    return [stage["state"] for stage in report["stages"] if stage["name"] in names]


def assert_same(folder: Path, reference: Path) -> None:
    """Every artifact, the grid and the final checkpoint of ``folder`` equal those of ``reference``."""
    digests, expected = (
        {name: manifest["digest"] for name, manifest in manifests(place / "store").items()}
        for place in (folder, reference)
    )
    assert digests == expected
    grid, whole = (KLGrid.open(str(payload(place / "store", "measure"))).read() for place in (folder, reference))
    assert grid.identical(whole)
    assert set(np.unique(grid["status"])) <= {1, 2}
    checkpoints = [digest_folder(place / "output" / "checkpoints" / "0.3-kl")[0] for place in (folder, reference)]
    assert checkpoints[0] == checkpoints[1]


def test_killed_and_interrupted_runs_continue_to_the_same_bytes(
    start: Callable[[CompressConfig], Run], config: Callable[[Path], CompressConfig], tmp_path: Path
) -> None:
    reference, folder, interrupted = (tmp_path / name for name in ("uninterrupted", "killed", "interrupted"))
    whole = start(config(reference))
    assert whole.wait() == 0, whole.log.read_text()

    store = folder / "store"
    first = start(config(folder))
    first.until(lambda: len(measured_rows(store)) >= 3)
    first.kill()
    done = measured_rows(store)
    written = {row: next(store.glob(f"work/*/grid/status/c/{row}/0")).stat().st_mtime_ns for row in done}
    rows = KLGrid.open(str(payload(reference / "store", "measure"))).read().sizes["unit"]
    assert 3 <= len(done) < rows
    assert not list(store.glob("manifest/measure/*"))

    second = start(config(folder))
    second.until(lambda: trained_steps(store) >= 5)
    second.kill()
    grid = payload(store, "measure")
    kept = {row: grid / "status" / "c" / str(row) / "0" for row in done}
    assert {row: path.stat().st_mtime_ns for row, path in kept.items()} == written  # not one was measured again
    killed_at = trained_steps(store)
    assert 5 <= killed_at < 32
    shutil.copytree(folder, interrupted)

    third = start(config(folder))
    assert third.wait() == 0, third.log.read_text()
    assert set(states(folder, "calibrate", "gather", "bases", "measure", "allocate")) == {"Cached"}
    assert "Completed" in states(folder, "train")
    assert_same(folder, reference)
    assert not [path for path in (store / "work").iterdir() if path.is_dir()]

    ctrl_c(start, config(interrupted), interrupted, killed_at)
    assert_same(interrupted, reference)


def ctrl_c(start: Callable[[CompressConfig], Run], config: CompressConfig, folder: Path, steps: int) -> None:
    """Interrupts a run in training once it has gone beyond ``steps``, then lets another finish."""
    store = folder / "store"
    seen: list[int] = []

    def advanced() -> bool:
        seen.append(trained_steps(store))
        return seen[-1] > steps + 2

    run = start(config)
    run.until(advanced)
    run.interrupt()
    assert run.wait() == 130, run.log.read_text()
    assert "the same command continues from there" in run.log.read_text()
    assert "Traceback" not in run.log.read_text()
    assert min(seen) >= steps  # it went on from the checkpoint: no smaller one was ever written
    assert not (folder / "output" / "report.json").exists()
    kept = trained_steps(store)
    assert kept > steps
    last = start(config)
    assert last.wait() == 0, last.log.read_text()
