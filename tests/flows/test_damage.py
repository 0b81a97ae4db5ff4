"""Damage to every file of a finished store: noticed under verify, and mended by computing one stage again."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.compress import compress
from flows.config import CompressConfig
from flows.graph import build
from flows.prepared import prepare
from storage.store import Store
from storage.upkeep import verify
from tasks.running import Stages

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]


def flip(file: Path) -> None:
    """Changes one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    """Leaves the first half of a file."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


DAMAGES: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut": cut, "deleted": Path.unlink}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    compress(tiny_config(folder))
    return folder


def owners(store: Path) -> dict[Path, set[str]]:
    """Returns, by each file of the store's artifacts, the keys of the artifacts that it belongs to."""
    found: dict[Path, set[str]] = {}
    for manifest in Store(str(store)).manifests():
        paths = [store / "payload" / manifest.digest / name for name in manifest.files]
        for path in (*paths, store / "manifest" / manifest.kind / f"{manifest.key}.json"):
            found.setdefault(path, set()).add(manifest.key)
    assert set(found) == {p for part in ("payload", "manifest") for p in (store / part).rglob("*") if p.is_file()}
    return found


def damaged(file: Path, kind: str) -> Iterator[None]:
    """Damages a file, then puts it back."""
    before = file.read_bytes()
    DAMAGES[kind](file)
    yield
    file.write_bytes(before)


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_to_every_file_is_noticed(kind: str, folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder / "store", store)
    files = owners(store)
    for file, keys in files.items():
        for _ in damaged(file, kind):
            found = {key for name, key in Store(str(store)).places() if Store(str(store), verify=True).find(name, key)}
            everything = {key for keys_of_one in files.values() for key in keys_of_one}
            assert everything - found == keys, file
    assert verify(Store(str(store)))[1] == []


@pytest.mark.slow
def test_every_damage_is_mended_by_computing_one_stage(folder: Path, tiny_config: Make, tmp_path: Path) -> None:
    shutil.copytree(folder / "store", tmp_path / "store")
    config = tiny_config(tmp_path, verify=True)
    files = owners(tmp_path / "store")
    for number, (file, keys) in enumerate(files.items()):
        before = file.read_bytes()
        DAMAGES[list(DAMAGES)[number % len(DAMAGES)]](file)
        records = run(config)
        computed = [record["key"] for record in records if record["state"] == "Completed"]
        assert set(computed) == keys, file
        assert len(computed) == 1 or len(keys) > 1, file
        if file.parent.parent.name != "manifest":  # a manifest also tells time and run
            assert file.read_bytes() == before
    print(f"{len(files)} files damaged, each mended by the one stage that makes it")


def run(config: CompressConfig) -> list[dict[str, Any]]:
    prepared = prepare(config)
    stages = Stages(place=config.store, runtime=prepared.runtime, verify=config.verify)
    build(stages, prepared)
    return [{"key": record.key, "state": record.state} for record in stages.records]
