"""Two runs at once on one store: both succeed, what they share is computed once, and no lock stays behind."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.config import CompressConfig
from storage.store import Store
from tests.flows.processes import Run, assert_one_copy, digests, starting

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]
Make = Callable[..., CompressConfig]
Start = Callable[[CompressConfig], Run]

LEFT_OF_ALLOCATE = ("calibrate", "calibrate_test", "gather", "bases", "measure")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as run:
        yield run


def both(runs: list[Run], store: Path) -> dict[str, set[int]]:
    """Waits for two runs that succeed; returns the inodes that each manifest was seen to have meanwhile."""
    written: dict[str, set[int]] = {}

    def look() -> None:
        for name in digests(store):
            written.setdefault(name, set()).add((store / "manifest" / name).stat().st_ino)

    while any(run.process.poll() is None for run in runs):
        look()
        time.sleep(0.001)
    assert [run.wait() for run in runs] == [0, 0], [run.text() for run in runs]
    look()
    return written


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


def test_the_same_twice_leaves_one_copy(start: Start, tiny_config: Make, tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("one", "two")]
    store = tmp_path / "store"
    written = both([start(tiny_config(tmp_path, output=output)) for output in outputs], store)
    assert_one_copy(store)
    first, second = (report(output) for output in outputs)
    keys = {(stage["name"], stage["key"]) for stage in first["stages"]}
    assert keys == {(stage["name"], stage["key"]) for stage in second["stages"]}
    assert {f"{name}/{key}.json" for name, key in keys} == set(digests(store))
    assert {name: len(inodes) for name, inodes in written.items()} == dict.fromkeys(digests(store), 1)
    assert [{**r, "checkpoint": None} for r in first["results"]] == [
        {**r, "checkpoint": None} for r in second["results"]
    ]


def test_two_ratios_share_everything_left_of_allocate(start: Start, tiny_config: Make, tmp_path: Path) -> None:
    ratios = (0.3, 0.5)
    store = tmp_path / "store"
    targets = [[{"ratio": ratio, "objective": "kl"}] for ratio in ratios]
    configs = [tiny_config(tmp_path, targets=t, output=tmp_path / str(t[0]["ratio"])) for t in targets]
    written = both([start(config) for config in configs], store)
    assert_one_copy(store)
    shared = [name for name in digests(store) if name.split("/")[0] in LEFT_OF_ALLOCATE]
    assert {name: len(written[name]) for name in shared} == dict.fromkeys(shared, 1)
    keys = [
        {stage["key"] for stage in report(config.output)["stages"] if stage["name"] in LEFT_OF_ALLOCATE}
        for config in configs
    ]
    assert keys[0] == keys[1] == {Path(name).stem for name in shared}
    runs = {manifest.lineage.run.id for manifest in Store(str(store)).manifests() if manifest.lineage.run is not None}
    assert runs == {report(config.output)["run"] for config in configs}
