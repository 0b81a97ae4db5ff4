"""The store's whole life on S3, over HTTP: artifacts, damage, upkeep, the grid, work that another machine continues."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray

from storage.grid import MEASURED, SKIPPED, KLGrid
from storage.runs import Needed, new_run, read_runs, write_run
from storage.store import ArtifactMissing, Store
from storage.upkeep import delete, find_garbage, verify
from tests.s3 import contents
from tests.storage.samples import FILES, LINEAGE, publish, read


@pytest.fixture
def store(s3_bucket: str) -> Store:
    return Store(f"s3://{s3_bucket}/some/store")


def path_of(store: Store, name: str) -> str:
    return f"{store.uri.removeprefix('s3://')}/{name}"


def test_what_is_published_is_found_with_its_files(store: Store, s3_bucket: str, tmp_path: Path) -> None:
    assert store.find("gather", "k1") is None
    ref = publish(store, tmp_path)
    assert store.find("gather", "k1") == ref == Store(store.uri, verify=True).find("gather", "k1")
    assert ref.uri == store.payload_uri(ref) == f"{store.uri}/payload/{ref.digest}"
    assert read(store.local(ref)) == FILES
    assert store.manifest("gather", "k1").lineage == LINEAGE
    assert [manifest.key for manifest in store.manifests()] == ["k1"]
    assert set(contents(s3_bucket)) == {
        "some/store/manifest/gather/k1.json",
        *(f"some/store/payload/{ref.digest}/{name}" for name in FILES),
    }


def test_one_content_under_two_keys_is_kept_once(store: Store, s3_bucket: str, tmp_path: Path) -> None:
    refs = [publish(store, tmp_path, key) for key in ("k1", "k2")]
    assert refs[0].digest == refs[1].digest
    assert len([name for name in contents(s3_bucket) if "/payload/" in name]) == len(FILES)


def test_another_process_sees_what_is_published_after_it_looked(store: Store, tmp_path: Path) -> None:
    other = Store(store.uri)
    assert other.find("gather", "k1") is None
    assert list(other.places()) == []
    ref = publish(store, tmp_path)
    assert other.find("gather", "k1") == ref
    assert list(other.places()) == [("gather", "k1")]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def gone(_: bytes) -> None:
    return None


@pytest.mark.parametrize(
    ("damage", "place", "verified"),
    [
        (gone, "payload", False),
        (cut, "payload", False),
        (flip, "payload", True),
        (gone, "manifest", False),
        (cut, "manifest", False),
        (flip, "manifest", False),
    ],
)
def test_damage_is_not_found_is_said_and_is_mended_by_publishing(
    damage: Callable[[bytes], bytes | None],
    place: str,
    verified: bool,
    store: Store,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ref = publish(store, tmp_path)
    name = path_of(store, "manifest/gather/k1.json" if place == "manifest" else f"payload/{ref.digest}/a.bin")
    changed = damage(store.files.fs.cat_file(name))
    if changed is None:
        store.files.fs.rm_file(name)
    else:
        store.files.fs.pipe_file(name, changed)
    later = Store(store.uri, verify=verified)
    with caplog.at_level(logging.WARNING):
        assert later.find("gather", "k1") is None
    assert ("gather k1" in caplog.text) != (damage is gone and place == "manifest")
    assert publish(later, tmp_path) == ref == later.find("gather", "k1")
    assert read(later.local(ref)) == FILES


def test_a_flipped_byte_is_never_handed_out(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ref = publish(store, tmp_path)
    name = path_of(store, f"payload/{ref.digest}/a.bin")
    store.files.fs.pipe_file(name, flip(FILES["a.bin"]))
    assert store.find("gather", "k1") == ref  # sizes alone do not tell
    with pytest.raises(ArtifactMissing, match=r"gather k1 is not in store.*run again"):
        store.local(ref)
    assert "a.bin has another content" in caplog.text
    assert store.find("gather", "k1") is None
    assert publish(store, tmp_path) == ref == Store(store.uri, verify=True).find("gather", "k1")
    assert read(store.local(ref)) == FILES


def test_verify_withdraws_what_is_damaged_and_nothing_else(store: Store, tmp_path: Path) -> None:
    whole = publish(store, tmp_path, "k1")
    other = publish(store, tmp_path, "k2", {"x": b"x" * 200})
    store.files.fs.pipe_file(path_of(store, f"payload/{other.digest}/x"), flip(b"x" * 200))
    count, damaged = verify(Store(store.uri))
    assert count == 2
    assert [(damage.kind, damage.key) for damage in damaged] == [("gather", "k2")]
    assert list(store.places()) == [("gather", "k1")]
    assert store.find("gather", "k1") == whole


def test_gc_deletes_what_no_run_needs(store: Store, s3_bucket: str, tmp_path: Path) -> None:
    kept = publish(store, tmp_path, "k1", {"a": b"a"})
    publish(store, tmp_path, "k2", {"b": b"bb"})
    for key in ("k3", "k4"):
        work = store.work(key)
        work.fetch()
        (work.path / "step").write_text("3")
        work.keep()
    needs = tuple(Needed(kind="gather", key=key) for key in ("k1", "k4"))  # it was at work on the second
    run = new_run("r1", "quiet-fox").model_copy(update={"needs": needs})
    write_run(store, run)
    assert read_runs(store) == [run]
    needed = [(need.kind, need.key) for need in read_runs(store)[0].needs]
    assert find_garbage(store, needed, grace_seconds=3600).names == {}  # all of it is new
    time.sleep(1.1)  # S3 tells times in whole seconds
    garbage = find_garbage(store, needed, grace_seconds=0)
    assert [manifest.key for manifest in garbage.artifacts] == ["k2"]
    assert garbage.num_bytes == 2 + 1
    delete(store, garbage, grace_seconds=0)
    assert set(contents(s3_bucket)) == {
        "some/store/manifest/gather/k1.json",
        f"some/store/payload/{kept.digest}/a",
        "some/store/run/r1.json",
        "some/store/work/k4/step",
    }
    assert store.find("gather", "k1") == kept


def test_a_grid_is_measured_and_compacted_on_s3(store: Store) -> None:
    path, units = f"{store.uri}/grid", ["a", "b", "c"]
    removed = np.array([[1, 2], [3, 4], [5, 6]])
    grid = KLGrid.create(path, units, removed, [0.25, 0.75])
    grid.write_row(1, np.array([0.5, np.nan]), np.array([MEASURED, SKIPPED], dtype=np.uint8))
    assert grid.pending() == KLGrid.open(path).pending() == [0, 2]
    with pytest.raises(ValueError, match="rows that are not whole: 0, 2"):
        grid.compact(f"{store.uri}/compact")
    for row in (2, 0):
        KLGrid.open(path).write_row(row, np.array([row, 2.5]), np.full(2, MEASURED, dtype=np.uint8))
    assert grid.pending() == []
    grid.compact(f"{store.uri}/compact")
    for data in (KLGrid.open(f"{store.uri}/compact").read(), xarray.open_zarr(f"{store.uri}/compact").load()):
        np.testing.assert_array_equal(data["kl"].values, [[0, 2.5], [0.5, np.nan], [2, 2.5]])
        assert data["status"].values.tolist() == [[MEASURED, MEASURED], [MEASURED, SKIPPED], [MEASURED, MEASURED]]
        assert data["removed"].values.tolist() == removed.tolist()
        assert data["unit"].values.tolist() == units
    chunks = [path for path in fsspec.filesystem("s3").find(path_of(store, "compact")) if "/c/" in path]
    assert len(chunks) == 5  # one an array


def test_a_published_grid_opens_from_its_uri(store: Store, tmp_path: Path) -> None:
    grid = KLGrid.create(str(tmp_path / "grid"), ["u"], np.ones((1, 1), dtype=np.int64), [0.5])
    grid.write_row(0, np.array([0.25]), np.ones(1, dtype=np.uint8))
    grid.compact(str(tmp_path / "compact"))
    ref = store.publish("measure", "k1", tmp_path / "compact", LINEAGE)
    assert xarray.open_zarr(store.payload_uri(ref))["kl"].values.tolist() == [[0.25]]


def test_another_machine_continues_where_the_first_one_was(
    store: Store, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.work("k1")
    first.fetch()
    (first.path / "checkpoint").mkdir()
    (first.path / "checkpoint" / "step").write_text("1")
    first.keep()
    (first.path / "checkpoint" / "step").write_text("22")
    (first.path / "checkpoint" / "torn.tmp").write_text("2")
    (first.path / "output").mkdir()
    (first.path / "output" / "half").write_text("?")
    first.keep()
    (first.path / "checkpoint" / "step").write_text("333")  # and this machine dies
    os.utime(first.path / "checkpoint" / "step", (time.time() - 5, time.time() - 5))  # S3 tells whole seconds
    assert contents(s3_bucket) == {"some/store/work/k1/checkpoint/step": b"22"}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    second = Store(store.uri).work("k1")
    assert second.path != first.path
    second.fetch()
    assert read(second.path) == {"checkpoint/step": b"22"}
    (second.path / "checkpoint" / "step").write_text("4444")
    second.keep()

    first.fetch()  # the other one has gone on
    assert (first.path / "checkpoint" / "step").read_text() == "4444"
    second.clear()
    assert contents(s3_bucket) == {}
    assert not second.path.exists()


def test_what_parts_write_beside_each_other_stays_theirs(
    store: Store, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = store.work("k1"), store.work("k1")
    one.fetch()
    (one.path / "rows").mkdir()
    for name in ("rows/1", "rows/2", "sums"):
        (one.path / name).write_text("1")
    one.keep("rows/1", "sums", "rows/3")
    assert sorted(contents(s3_bucket)) == ["some/store/work/k1/rows/1", "some/store/work/k1/sums"]

    download = store.files.download

    def slow(name: str, file: Path) -> None:
        download(name, file)
        (one.path / "sums").write_text("22")
        os.utime(one.path / "sums", (time.time() + 5, time.time() + 5))  # S3 tells whole seconds

    monkeypatch.setattr(store.files, "download", slow)
    os.utime(one.path / "sums", (time.time() - 5, time.time() - 5))
    other.fetch()
    assert read(one.path) == {"rows/1": b"1", "rows/2": b"1", "sums": b"22"}


def test_only_what_changed_is_uploaded(store: Store) -> None:
    work = store.work("k1")
    work.fetch()
    for name in "ab":
        (work.path / name).write_text("1")
    work.keep()
    store.files.fs.pipe_file(path_of(store, "work/k1/a"), b"left alone")
    (work.path / "b").write_text("22")
    work.keep()
    assert [store.files.read(f"work/k1/{name}") for name in "ab"] == [b"left alone", b"22"]


PUBLISHER = """
import sys, time
from pathlib import Path
from storage.store import Store
from tests.storage.samples import publish
root, name, uri = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
store = Store(uri)
(root / f"ready-{name}").touch()
while not (root / "go").exists():
    time.sleep(0.001)
for turn in range(8):
    ref = publish(store, root / name, f"k{turn}", {f"{i}.bin": bytes([turn]) * 1000 for i in range(3)})
    assert store.find("gather", f"k{turn}") == ref, turn
    print(ref.digest)
"""


def test_two_processes_that_publish_one_key_both_succeed_and_leave_one_artifact(store: Store, tmp_path: Path) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path), name, store.uri],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / name)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    while not all((tmp_path / f"ready-{name}").exists() for name in "ab"):
        assert all(process.poll() is None for process in both), [process.communicate() for process in both]
        time.sleep(0.01)
    (tmp_path / "go").touch()
    ends = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    (first, _), (second, _) = ends
    assert first == second
    assert store.files.names("payload") == sorted(first.split())
    assert sorted(store.places()) == [("gather", f"k{turn}") for turn in range(8)]
    assert verify(store) == (8, [])
