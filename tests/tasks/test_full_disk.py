"""A stage on a disk without room: the error names the folder, what is finished is kept, and room lets it continue."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.faults import StoreFull
from storage.store import Store
from tasks.caching import Runtime, Stage, Work
from tests.disks import fill


def write(work: Work, calls: list[str], size: int) -> None:
    """A stage in two steps: the first one's result survives in ``scratch``, the second fills ``output``."""
    if not (work.scratch / "first").exists():
        calls.append("first")
        (work.scratch / "first").write_bytes(b"1" * 10_000)
    calls.append("second")
    (work.output / "big").write_bytes(b"2" * size)


def run(stage: Stage, store: Store) -> Callable[[], object]:
    return lambda: stage.compute(store, "k1", "write", Runtime(), {}, {}, {}, None)


def test_work_that_finds_no_room_names_its_folder_and_continues(small_disk: Path) -> None:
    store, calls = Store(str(small_disk / "store")), list[str]()
    compute = run(Stage(lambda work: write(work, calls, 100_000), 1, "write"), store)
    filler = fill(small_disk, but=50_000)
    with pytest.raises(
        StoreFull, match=rf"'{store.uri}/work/k1' is full: write found no room.*what is finished is kept"
    ):
        compute()
    assert list(store.places()) == store.files.names("payload") == []
    assert store.find("write", "k1") is None
    filler.unlink()
    compute()
    assert calls == ["first", "second", "second"]
    found = store.find("write", "k1")
    assert found is not None
    assert (store.local(found) / "big").read_bytes() == b"2" * 100_000
    assert not store.files.names("work")


def test_what_is_computed_and_cannot_be_published_is_not_computed_again(small_disk: Path) -> None:
    store, calls = Store(str(small_disk / "store")), list[str]()

    def write_all(work: Work) -> None:
        write(work, calls, 50_000)
        fill(small_disk)

    compute = run(Stage(write_all, 1, "write"), store)
    with pytest.raises(StoreFull, match=rf"'{store.uri}' is full: writing manifest/write/k1.json found no room"):
        compute()
    assert list(store.places()) == []
    assert list((small_disk / "store").rglob("*.tmp")) == []
    (small_disk / "filler").unlink()
    compute()
    assert calls == ["first", "second"]
    found = Store(store.uri, verify=True).find("write", "k1")
    assert found is not None
