"""``python -m flows compress``, killed or interrupted in a long stage: the same command continues to the same bytes."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.config import CompressConfig
from storage.grid import KLGrid
from tests.flows.processes import Run, assert_same, measured_rows, payload, starting, trained_steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]
Make = Callable[..., CompressConfig]
Start = Callable[[CompressConfig], Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as run:
        yield run


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


def states(folder: Path, *names: str) -> list[str]:
    report = json.loads((folder / "output" / "report.json").read_text())
    return [stage["state"] for stage in report["stages"] if stage["name"] in names]


def times(store: Path, rows: list[int]) -> list[int]:
    """Returns when each of ``rows`` was written."""
    return [next(store.glob(f"work/*/grid/status/c/{row}/0")).stat().st_mtime_ns for row in rows]


def test_killed_and_interrupted_runs_continue_to_the_same_bytes(
    start: Start, config: Callable[[Path], CompressConfig], tmp_path: Path
) -> None:
    reference, folder, interrupted = (tmp_path / name for name in ("uninterrupted", "killed", "interrupted"))
    whole = start(config(reference))
    assert whole.wait() == 0, whole.text()

    store = folder / "store"
    first = start(config(folder))
    first.until(lambda: len(measured_rows(store)) >= 3)
    first.kill()
    done = measured_rows(store)
    (begun,) = store.glob("work/*/grid")
    kept, written = KLGrid.open(str(begun)).read(), times(store, done)
    assert 3 <= len(done) < kept.sizes["unit"]
    assert not list(store.glob("manifest/measure/*"))

    second = start(config(folder))
    second.until(lambda: len(measured_rows(store)) > len(done))
    assert times(store, done) == written  # it went on behind them
    second.until(lambda: trained_steps(store) >= 5)
    second.kill()
    grid = KLGrid.open(str(payload(store, "measure"))).read()
    for name in ("kl", "status"):
        assert grid[name].values[done].tobytes() == kept[name].values[done].tobytes()
    killed_at = trained_steps(store)
    assert 5 <= killed_at < 32
    shutil.copytree(folder, interrupted)

    third = start(config(folder))
    assert third.wait() == 0, third.text()
    assert set(states(folder, "calibrate", "gather", "bases", "measure")) == {"Cached"}
    assert states(folder, "allocate") == ["Cached", "Completed"]  # the uniform one comes after the training
    assert "Completed" in states(folder, "train")
    assert_same(folder, reference)
    assert not [path for path in (store / "work").iterdir() if path.is_dir()]

    ctrl_c(start, config(interrupted), interrupted, killed_at)
    assert_same(interrupted, reference)


def ctrl_c(start: Start, config: CompressConfig, folder: Path, steps: int) -> None:
    """Interrupts a run in training once it has gone beyond ``steps``, then lets another finish."""
    store = folder / "store"
    seen: list[int] = []

    def advanced() -> bool:
        seen.append(trained_steps(store))
        return seen[-1] > steps + 2

    run = start(config)
    run.until(advanced)
    run.interrupt()
    assert run.wait() == 130, run.text()
    assert "the same command continues from there" in run.text()
    assert "Traceback" not in run.text()
    assert min(seen) >= steps  # it went on from the checkpoint: no smaller one was ever written
    assert not (folder / "output" / "report.json").exists()
    kept = trained_steps(store)
    assert kept > steps
    last = start(config)
    assert last.wait() == 0, last.text()
