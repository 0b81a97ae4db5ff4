"""The whole flow with everything on S3 over HTTP: the store, the grid, the work and Prefect's own records."""

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xarray

from flows.compress import compress
from flows.config import CompressConfig
from storage.grid import MEASURED, SKIPPED, KLGrid
from storage.store import Store
from storage.upkeep import verify
from tests.s3 import contents, environment, using

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="module")
def machine(s3_server: str, folder: Path) -> Callable[[str], Any]:
    """Returns a maker of machines, by name: each has a cache folder of its own."""
    return lambda name: using(environment(s3_server) | {"XDG_CACHE_HOME": str(folder / name)})


@pytest.fixture(scope="module")
def bucket() -> str:
    return f"bucket-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def first(folder: Path, bucket: str, tiny_config: Make, machine: Callable[[str], Any]) -> dict[str, Any]:
    with machine("first"):
        return compress(tiny_config(folder, store=f"s3://{bucket}/a/store"))


@pytest.fixture
def here(machine: Callable[[str], Any]) -> Iterator[None]:
    """The machine of the first run."""
    with machine("first"):
        yield


def states(report: dict[str, Any], *names: str) -> set[str]:
    return {stage["state"] for stage in report["stages"] if not names or stage["name"] in names}


def digests(store: Store) -> dict[tuple[str, str], str]:
    return {(manifest.kind, manifest.key): manifest.digest for manifest in store.manifests()}


def test_every_artifact_is_that_of_a_local_store(
    first: dict[str, Any], here: None, bucket: str, tiny_config: Make, tmp_path: Path
) -> None:
    assert states(first) == {"Completed"}
    local = compress(tiny_config(tmp_path))
    on_s3 = Store(f"s3://{bucket}/a/store")
    made = digests(on_s3)
    assert made == digests(Store(str(tmp_path / "store")))
    assert set(made) == {(stage["name"], stage["key"]) for stage in local["stages"]}
    assert local["results"][0]["perplexity"] == first["results"][0]["perplexity"]
    assert verify(on_s3) == (len(made), [])


def test_nothing_is_left_on_s3_but_artifacts_and_runs(first: dict[str, Any], here: None, bucket: str) -> None:
    left = {name.split("/")[2] for name in contents(bucket)}
    assert left - {"results"} == {"manifest", "payload", "run"}  # the results of a later run may be there


def test_a_second_run_is_all_cached_also_on_another_machine(
    first: dict[str, Any], folder: Path, bucket: str, tiny_config: Make, machine: Callable[[str], Any], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        with machine(name):
            report = compress(tiny_config(tmp_path, store=f"s3://{bucket}/a/store"))
        assert states(report) == {"Cached"}
        result, expected = ({k: v for k, v in r["results"][0].items() if k != "checkpoint"} for r in (report, first))
        assert result == expected
    checkpoint = Path("checkpoints") / "0.3-kl" / "model.safetensors"
    assert (tmp_path / "output" / checkpoint).read_bytes() == (folder / "output" / checkpoint).read_bytes()
    with machine("third"):
        objects = contents(bucket)
    records = {name.removeprefix("a/store/results/"): data for name, data in objects.items() if "/results/" in name}
    assert set(records) == {stage["key"] for stage in first["stages"]}
    for key, data in records.items():
        assert json.loads(json.loads(data)["result"])["key"] == key


def test_the_grid_opens_from_its_uri(first: dict[str, Any], here: None, bucket: str) -> None:
    assert first["grid"].startswith(f"s3://{bucket}/a/store/payload/")
    grid = xarray.open_zarr(first["grid"])
    assert set(grid["status"].values.ravel().tolist()) == {MEASURED, SKIPPED}


class Killed(BaseException):
    """Ends a run where a kill would."""


def test_another_machine_measures_on_where_the_first_one_died(
    tiny_config: Make, machine: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, store=f"s3://bucket-{uuid.uuid4().hex}/store")
    written: list[int] = []
    write_row = KLGrid.write_row
    last = 3

    def counted(self: KLGrid, unit: int, *row: Any) -> None:
        if len(written) == last:
            raise Killed
        written.append(unit)
        write_row(self, unit, *row)

    monkeypatch.setattr(KLGrid, "write_row", counted)
    with machine("dies"), pytest.raises(Killed):
        compress(config)
    assert written == [0, 1, 2]
    last = 1000
    with machine("goes on"):
        report = compress(config)
        assert Store(config.store).files.names("work") == []
    assert written == list(range(len(report["units"])))
    assert states(report, "calibrate", "gather", "bases") == {"Cached"}
    assert states(report, "measure") == {"Completed"}


def test_a_store_in_memory_serves_one_process(
    tiny_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tiny_config(tmp_path, store=f"memory://{uuid.uuid4().hex}/store")
    assert states(compress(config)) == {"Completed"}
    report = compress(config)
    assert states(report) == {"Cached"}
    assert xarray.open_zarr(report["grid"])["kl"].shape[0] == len(report["units"])
