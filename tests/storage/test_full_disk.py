"""A disk without room: the error says which and what to do, nothing half-written is left, and room mends it."""

from pathlib import Path

import pytest

from storage.faults import Patience, StoreFull
from storage.files import Files
from storage.store import Store
from tests.disks import fill
from tests.storage.samples import LINEAGE, make_folder, read


def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(small_disk: Path) -> None:
    store = Store(str(small_disk / "store"))
    folder = make_folder(small_disk, {"big": b"1" * 100_000, "small": b"2"})
    filler = fill(small_disk)
    with pytest.raises(StoreFull, match=rf"'{store.uri}' is full: writing manifest.*store gc.*name another store"):
        store.publish("gather", "k1", folder, LINEAGE)
    assert [path for path in Path(store.uri).rglob("*") if path.is_file()] == []
    assert store.find("gather", "k1") is None
    filler.unlink()
    ref = store.publish("gather", "k1", folder, LINEAGE)
    assert read(store.local(ref)) == {"big": b"1" * 100_000, "small": b"2"}
    assert Store(store.uri, verify=True).find("gather", "k1") == ref


def test_opening_a_store_on_a_full_disk_says_so_and_leaves_nothing(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(StoreFull, match=rf"'{small_disk}/store' is full"):
        Store(str(small_disk / "store"))
    assert list((small_disk / "store").iterdir()) == []


def test_a_cache_folder_that_is_full_is_named_rather_than_the_store(
    s3_bucket: str, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk / "cache"))
    store = Files(f"s3://{s3_bucket}/store", None, Patience(), writable=True)
    store.write("file", b"1" * 100_000)
    filler = fill(small_disk)
    with pytest.raises(StoreFull, match=rf"'{small_disk}/cache' is full: downloading file.*XDG_CACHE_HOME"):
        store.download("file", small_disk / "cache" / "file")
    filler.unlink()
    store.download("file", small_disk / "cache" / "file")
    assert (small_disk / "cache" / "file").stat().st_size == 100_000
