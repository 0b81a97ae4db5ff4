"""What is published is found whole by everybody; what is damaged is not found, and the log says so."""

import json
import logging
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray
from fsspec.implementations.local import LocalFileSystem

import storage
from storage.digest import digest_folder
from storage.faults import StoreError
from storage.grid import KLGrid
from storage.manifest import ArtifactRef, InputRecord, Lineage, RunName
from storage.store import ArtifactMissing, Store

LINEAGE = Lineage(
    stage="gather",
    version=3,
    inputs={"tokens": InputRecord(digest="d0", kind="calibrate", key="k0"), "model": InputRecord(digest="d1")},
    settings={"tie": True},
    packages={"torch": "2.13.0"},
    device="cpu",
    run=RunName(id="r0", name="busy-bee"),
    seconds=1.5,
)
FILES = {"a.bin": b"\x00\x01\x02", "sub/b.json": b"{}", "empty": b""}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remote stores work and download below this folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}/store")


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def outputs(tmp_path: Path) -> Callable[..., Path]:
    """Makes folders to publish."""

    def make(files: dict[str, bytes] = FILES) -> Path:
        folder = tmp_path / "outputs" / uuid.uuid4().hex
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    return make


def publish(store: Store, folder: Path, key: str = "k1") -> ArtifactRef:
    return store.publish("gather", key, folder, LINEAGE)


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_published_is_found_with_its_files(store: Store, outputs: Callable[..., Path]) -> None:
    folder = outputs()
    digest = digest_folder(folder)[0]
    assert store.find("gather", "k1") is None
    ref = publish(store, folder)
    assert (ref.kind, ref.key, ref.digest, ref.num_bytes) == ("gather", "k1", digest, 5)
    assert store.find("gather", "k1") == ref == Store(store.uri).find("gather", "k1")
    assert store.find("gather", "k2") is store.find("bases", "k1") is None
    assert read(store.local(ref)) == FILES
    assert ArtifactRef.model_validate_json(ref.model_dump_json()) == ref


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o700])
def test_a_file_can_be_read_by_whoever_can_read_its_folder(
    local_store: Store, outputs: Callable[..., Path], mode: int
) -> None:
    folder = outputs()
    for name in FILES:
        (folder / name).chmod(0o600)
    folder.chmod(mode)
    there = local_store.local(publish(local_store, folder))
    assert {(there / name).stat().st_mode & 0o777 for name in FILES} == {mode & 0o666}


def test_the_manifest_says_where_the_artifact_comes_from(store: Store, outputs: Callable[..., Path]) -> None:
    ref = publish(store, outputs())
    manifest = store.manifest(ref.kind, ref.key)
    assert manifest.lineage == LINEAGE
    assert {name: facts.size for name, facts in manifest.files.items()} == {n: len(d) for n, d in FILES.items()}
    assert list(store.manifests()) == [manifest]


def test_the_payload_digest_covers_neither_key_nor_time(store: Store, outputs: Callable[..., Path]) -> None:
    first, second = publish(store, outputs(), "k1"), publish(store, outputs(), "k2")
    assert first.digest == second.digest
    assert store.manifest("gather", "k1").to_json() != store.manifest("gather", "k2").to_json()


def test_a_publish_that_dies_before_its_last_step_leaves_nothing_to_find(
    local_store: Store, outputs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)  # the manifest's rename
        with pytest.raises(KeyboardInterrupt):
            publish(local_store, outputs())
    assert local_store.find("gather", "k1") is None
    ref = publish(local_store, outputs())
    assert local_store.find("gather", "k1") == ref
    assert read(local_store.local(ref)) == FILES


def test_the_manifest_comes_after_the_payload(
    local_store: Store, outputs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    replace = Path.replace

    def watch(path: Path, target: Path) -> Path:
        payloads = list(Path(local_store.uri, "payload").iterdir())
        seen.append([read(payload) for payload in payloads])
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watch)
    publish(local_store, outputs())
    assert seen == [[FILES]]


def test_a_payload_that_is_there_is_kept(local_store: Store, outputs: Callable[..., Path]) -> None:
    ref = publish(local_store, outputs())
    before = (local_store.local(ref) / "a.bin").stat()
    publish(local_store, outputs(), "k2")
    after = (local_store.local(ref) / "a.bin").stat()
    assert before.st_ino == after.st_ino
    assert before.st_mtime_ns < after.st_mtime_ns  # young again, so that gc leaves it alone


def damage_size(payload: Path, _: Path) -> None:
    (payload / "a.bin").write_bytes(b"12")


def damage_missing(payload: Path, _: Path) -> None:
    (payload / "sub" / "b.json").unlink()


def damage_cut_manifest(_: Path, manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes()[:40])


def damage_empty_manifest(_: Path, manifest: Path) -> None:
    manifest.write_bytes(b"")


def damage_changed_manifest(_: Path, manifest: Path) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"digest": "0" * 64}))


@pytest.mark.parametrize(
    "damage",
    [damage_size, damage_missing, damage_cut_manifest, damage_empty_manifest, damage_changed_manifest],
)
def test_damage_is_not_found_is_said_and_is_mended_by_publishing(
    damage: Callable[[Path, Path], None],
    local_store: Store,
    outputs: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ref = publish(local_store, outputs())
    (manifest,) = Path(local_store.uri, "manifest", "gather").iterdir()
    damage(local_store.local(ref), manifest)
    with caplog.at_level(logging.WARNING):
        assert local_store.find("gather", "k1") is None
    assert "gather k1" in caplog.text
    assert publish(local_store, outputs()) == ref == local_store.find("gather", "k1")
    assert read(local_store.local(ref)) == FILES
    assert len(list(Path(local_store.uri, "payload").iterdir())) == 1


def test_a_damaged_remote_payload_is_mended(outputs: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    store = Store(f"memory://{uuid.uuid4().hex}/store")
    ref = publish(store, outputs())
    store.files.remove(f"payload/{ref.digest}/a.bin")
    assert store.find("gather", "k1") is None
    assert "a.bin" in caplog.text
    assert publish(store, outputs()) == store.find("gather", "k1")
    assert read(store.local(ref)) == FILES


PUBLISHER = """
import sys, time
from pathlib import Path
from storage.manifest import Lineage
from storage.store import Store
LINEAGE = Lineage(
    stage="gather", version=1, inputs={}, settings={}, packages={}, device="cpu", run=None, seconds=0.0
)
root, name = Path(sys.argv[1]), sys.argv[2]
(root / f"ready-{name}").touch()
while not (root / "go").exists():
    time.sleep(0.001)
store = Store(str(root / "store"))
for turn in range(20):
    folder = root / f"{name}-{turn}"
    folder.mkdir()
    for file in range(5):
        (folder / f"{file}.bin").write_bytes(bytes([turn]) * 1000)
    ref = store.publish("gather", f"k{turn}", folder, LINEAGE)
    assert store.find("gather", f"k{turn}") == ref, turn
    print(ref.digest)
"""


def test_two_processes_that_publish_one_key_both_succeed_and_leave_one_artifact(tmp_path: Path) -> None:
    root = Path(storage.__file__).parent.parent
    command = [sys.executable, "-c", PUBLISHER, str(tmp_path)]
    both = [
        subprocess.Popen([*command, name], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    while not all((tmp_path / f"ready-{name}").exists() for name in "ab"):
        assert all(process.poll() is None for process in both), [process.communicate() for process in both]
        time.sleep(0.01)
    (tmp_path / "go").touch()
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    (first, _), (second, _) = ends
    assert first == second
    payloads = sorted(path.name for path in (tmp_path / "store" / "payload").iterdir())
    assert payloads == sorted(first.split())
    kept = sorted(path.name for path in (tmp_path / "store" / "manifest" / "gather").iterdir())
    assert kept == sorted(f"k{turn}.json" for turn in range(20))


def test_work_survives_until_it_is_cleared(store: Store) -> None:
    work = store.work("k1")
    work.fetch()
    (work.path / "step").touch()
    work.keep()
    assert (Store(store.uri).work("k1").path / "step").exists()
    store.work("k2").fetch()
    work.clear()
    assert not work.path.exists()
    assert store.work("k2").path.exists()
    work.clear()


def test_work_of_a_remote_store_is_apart_from_other_stores(cache: Path) -> None:
    folders = [Store(f"memory://{name}/store").work("k1").path for name in ("one", "two")]
    assert len(set(folders)) == 2
    assert all(folder.is_relative_to(cache) for folder in folders)


def test_a_reference_whose_files_are_gone_is_an_error_of_its_own(store: Store) -> None:
    gone = ArtifactRef(kind="gather", key="k1", uri="", digest="0" * 64, num_bytes=1)
    with pytest.raises(ArtifactMissing, match=r"gather k1 is not in store.*run again"):
        store.local(gone)
    with pytest.raises(ArtifactMissing, match=r"gather k1 is not in store.*run again"):
        store.manifest("gather", "k1")


@pytest.mark.parametrize("finder", ["path", "uri"])
def test_a_grid_opens_where_it_is_published(finder: str, store: Store, tmp_path: Path) -> None:
    grid = KLGrid.create(str(tmp_path / "grid"), ["u"], np.ones((1, 1), dtype=np.int64), [0.5])
    grid.write_row(0, np.array([0.25]), np.ones(1, dtype=np.uint8))
    grid.compact(str(tmp_path / "compact"))
    ref = publish(store, tmp_path / "compact")
    with xarray.open_zarr(str(store.local(ref)) if finder == "path" else store.payload_uri(ref)) as data:
        assert data["kl"].values.tolist() == [[0.25]]


def test_a_store_that_cannot_be_written_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "store"
    with pytest.raises(StoreError, match=f"{place}.*cannot be written.*permissions, or name another"):
        Store(str(place))


def test_a_uri_that_nothing_reads_is_named() -> None:
    with pytest.raises(StoreError, match=r"nowhere://bucket.*Protocol not known"):
        Store("nowhere://bucket")


def test_opening_a_store_leaves_nothing_in_it(tmp_path: Path) -> None:
    Store(str(tmp_path / "store"))
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("text", ["[]", "null", "3", "{}"])
def test_a_manifest_that_is_other_json_is_damage(
    text: str, local_store: Store, outputs: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    ref = publish(local_store, outputs())
    Path(local_store.uri, "manifest", "gather", "k1.json").write_text(text)
    assert local_store.find("gather", "k1") is None
    assert "gather k1" in caplog.text
    assert publish(local_store, outputs()) == ref == local_store.find("gather", "k1")


def test_a_manifest_under_another_key_is_damage(local_store: Store, outputs: Callable[..., Path]) -> None:
    publish(local_store, outputs())
    folder = Path(local_store.uri, "manifest", "gather")
    (folder / "k2.json").write_bytes((folder / "k1.json").read_bytes())
    assert local_store.find("gather", "k2") is None


def test_an_artifact_that_lost_a_file_is_missing(store: Store, outputs: Callable[..., Path]) -> None:
    ref = publish(store, outputs())
    store.files.remove(f"payload/{ref.digest}/a.bin")
    with pytest.raises(ArtifactMissing, match=r"gather k1 is not in store.*run again"):
        store.local(ref)


def test_a_damaged_download_is_fetched_again(outputs: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    store = Store(f"memory://{uuid.uuid4().hex}/store")
    ref = publish(store, outputs())
    (store.local(ref) / "a.bin").write_bytes(b"")
    assert read(store.local(ref)) == FILES
    assert "fetched again" in caplog.text


def test_a_store_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalFileSystem, "cat_file", refuse)
    with pytest.raises(StoreError, match=r"read \(Permission denied\): fix its permissions, or name another"):
        Store(str(tmp_path / "store"))


def test_a_relative_store_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("store")
    assert store.uri == str(tmp_path / "store")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert Store(store.uri).work("k1").path == tmp_path / "store" / "work" / "k1"
