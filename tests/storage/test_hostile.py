"""Names and links made to lead out of the store: refused, or taken for damage; nothing outside is touched."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from storage.digest import canonical_json, digest_bytes
from storage.faults import StoreError
from storage.files import LeadsElsewhere
from storage.manifest import ArtifactRef, InputRecord, RunName
from storage.runs import Needed, RunRecord, read_runs
from storage.store import Store
from storage.upkeep import delete, find_garbage, find_key, verify
from tests.storage.samples import FILES, LINEAGE, make_folder, publish, read

NAMES = ["..", ".", "", "/etc/passwd", "../x", "a/../../x", "a/..", "\0", "a\0b", "..\\x", "\\\\host\\x"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Returns a folder beside the store with a file called as those of a store; the test must leave it as it is."""
    folder = make_folder(tmp_path / "outside", FILES | {"k1.json": b"secret", "step": b"1"})
    before = state(folder)
    yield folder
    assert state(folder) == before


def state(folder: Path) -> dict[str, Any]:
    """Returns what there is below a folder, and when each of it was written."""
    found: dict[str, Any] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        facts = path.lstat()
        found[str(path.relative_to(folder))] = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
    return found


def seal(store: Store, changes: dict[str, Any]) -> None:
    """Changes the manifest of gather k1 and gives it the digest that goes with the change."""
    path = Path(store.uri, "manifest", "gather", "k1.json")
    content = json.loads(path.read_text()) | changes
    content.pop("manifest_digest")
    path.write_text(json.dumps(content | {"manifest_digest": digest_bytes(canonical_json(content).encode())}))


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_whose_files_lead_elsewhere_is_damage(
    name: str, store: Store, outside: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = publish(store, tmp_path)
    seal(store, {"files": {name: {"sha256": digest_bytes(b"secret"), "size": 6}}})
    assert store.find("gather", "k1") is None
    assert "gather k1: its manifest is damaged" in caplog.text
    assert list(store.manifests()) == []
    with pytest.raises(ValueError, match="not in store"):
        store.local(ref)
    assert publish(store, tmp_path) == ref == store.find("gather", "k1")


@pytest.mark.parametrize("field", ["digest", "key", "kind"])
@pytest.mark.parametrize("name", [*NAMES, "a/b", "a.b", "a\n"])
def test_a_manifest_whose_names_are_no_names_is_damage(field: str, name: str, store: Store, tmp_path: Path) -> None:
    ref = publish(store, tmp_path)
    seal(store, {field: name})
    assert store.find("gather", "k1") is None
    with pytest.raises(ValueError, match="not in store"):
        store.local(ref)


@pytest.mark.parametrize("name", [*NAMES, "a/b", "a\n"])
def test_references_and_records_take_no_such_name(name: str) -> None:
    plain = {"kind": "gather", "key": "k1", "digest": "d", "uri": "", "num_bytes": 1}
    for field in ("kind", "key", "digest"):
        with pytest.raises(ValidationError):
            ArtifactRef.model_validate(plain | {field: name})
    for make in (
        lambda: InputRecord(digest="d", kind="gather", key=name),
        lambda: Needed(kind=name, key="k1"),
        lambda: RunRecord(id=name, name="x", started="now"),
        lambda: RunName(id=name, name="x"),
    ):
        with pytest.raises(ValidationError):
            make()


@pytest.mark.parametrize("name", [name for name in NAMES if name])  # without a name it is the store itself
def test_no_file_of_a_store_has_such_a_name(name: str, store: Store, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.files.read(name),
        lambda: store.files.write(name, b"x"),
        lambda: store.files.remove(name),
        lambda: store.files.sizes(name),
        lambda: store.files.names(name),
        lambda: store.withdraw("gather", f"../{name}"),
        lambda: store.work(f"{name}/../.."),
    ]
    before = state(tmp_path)
    for call in calls:
        with pytest.raises(ValueError, match="leads out of its folder"):
            call()
    assert store.find("gather", f"../{name}") is None
    assert state(tmp_path) == before


def test_a_payload_file_that_is_a_link_is_damage(
    store: Store, outside: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = publish(store, tmp_path)
    file = store.local(ref) / "a.bin"
    file.unlink()
    file.symlink_to(outside / "a.bin")  # even of the same content
    for verified in (False, True):
        assert Store(store.uri, verify=verified).find("gather", "k1") is None
    assert "is a link that leads elsewhere" in caplog.text
    with pytest.raises(ValueError, match="not in store"):
        store.local(ref)
    assert publish(store, tmp_path) == ref == store.find("gather", "k1")
    assert read(store.local(ref)) == FILES
    assert not file.is_symlink()


@pytest.mark.parametrize("part", ["sub", ""], ids=["folder", "payload"])
def test_a_payload_folder_that_is_a_link_is_damage(part: str, store: Store, outside: Path, tmp_path: Path) -> None:
    ref = publish(store, tmp_path)
    folder = store.local(ref) / part
    folder.rename(tmp_path / "moved")
    folder.symlink_to(outside / part, target_is_directory=True)
    assert store.find("gather", "k1") is None
    assert publish(store, tmp_path) == ref == store.find("gather", "k1")
    assert read(store.local(ref)) == FILES
    assert not folder.is_symlink()


def test_a_file_that_was_added_to_a_payload_is_damage(store: Store, outside: Path, tmp_path: Path) -> None:
    ref = publish(store, tmp_path)
    (store.local(ref) / "config.json").symlink_to(outside / "k1.json")
    assert store.find("gather", "k1") is None
    assert publish(store, tmp_path) == ref == store.find("gather", "k1")
    assert read(store.local(ref)) == FILES


def test_a_manifest_that_is_a_link_is_damage(store: Store, outside: Path, tmp_path: Path) -> None:
    ref = publish(store, tmp_path)
    path = Path(store.uri, "manifest", "gather", "k1.json")
    path.unlink()
    path.symlink_to(outside / "k1.json")
    assert store.find("gather", "k1") is None
    assert publish(store, tmp_path) == ref == store.find("gather", "k1")
    assert not path.is_symlink()
    path.unlink()
    path.symlink_to(outside / "k1.json")
    assert [damage.key for damage in verify(store)[1]] == ["k1"]  # withdrawn: the link, not what it leads to
    assert not os.path.lexists(path)


def test_a_folder_of_manifests_that_is_a_link_is_refused(store: Store, outside: Path, tmp_path: Path) -> None:
    publish(store, tmp_path)
    folder = Path(store.uri, "manifest", "gather")
    folder.rename(tmp_path / "moved")
    folder.symlink_to(outside, target_is_directory=True)
    assert store.find("gather", "k1") is None
    calls: list[Callable[[], object]] = [
        lambda: publish(store, tmp_path),
        lambda: list(store.manifests()),
        lambda: store.withdraw("gather", "k1"),
        lambda: verify(store),
        lambda: find_key(store, "k1"),
        lambda: find_garbage(store, [], grace_seconds=0),
    ]
    for call in calls:
        with pytest.raises(LeadsElsewhere, match=r"manifest/gather.* is a link that leads elsewhere .*: remove it"):
            call()


@pytest.mark.parametrize("link", ["payload/evil", "work/evil", "results/evil"])
def test_gc_deletes_nothing_outside(link: str, store: Store, outside: Path) -> None:
    path = Path(store.uri, link)
    path.parent.mkdir()
    path.symlink_to(outside, target_is_directory=True)
    with pytest.raises(LeadsElsewhere, match=rf"{link} is a link that leads elsewhere .*: remove it"):
        delete(store, find_garbage(store, [], grace_seconds=-60), grace_seconds=-60)
    store.files.remove(link)
    assert not os.path.lexists(path)


def test_a_work_folder_that_is_a_link_is_refused(store: Store, outside: Path) -> None:
    Path(store.uri, "work").mkdir()
    Path(store.uri, "work", "k1").symlink_to(outside, target_is_directory=True)
    with pytest.raises(LeadsElsewhere, match="work/k1 is a link that leads elsewhere"):
        store.work("k1")


def test_links_in_a_work_folder_are_removed(store: Store, outside: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(store.uri, "work", "k1")
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "finished-0").symlink_to(outside, target_is_directory=True)
    (folder / "checkpoint" / "state.tmp").symlink_to(outside / "step")
    (folder / "checkpoint" / "kept").write_text("1")
    work = store.work("k1")
    work.fetch()
    assert sorted(path.name for path in folder.rglob("*")) == ["checkpoint", "kept"]
    assert caplog.text.count("is a link and removed") == 2
    (folder / "finished-0").symlink_to(outside, target_is_directory=True)
    work.clear()
    assert not folder.exists()


def test_a_run_that_is_a_link_is_damage(store: Store, outside: Path) -> None:
    Path(store.uri, "run").mkdir()
    Path(store.uri, "run", "r1.json").symlink_to(outside / "k1.json")
    with pytest.raises(StoreError, match=r"run/r1\.json .* is damaged.*delete it"):
        read_runs(store)


def test_objects_with_such_names_are_passed_over(s3_bucket: str, tmp_path: Path) -> None:
    store = Store(f"s3://{s3_bucket}/store")
    ref = publish(store, tmp_path)
    for name in ("work/k1/../../../../evil", "payload/../evil", "manifest/../k9.json", "manifest/gather/...json"):
        store.files.fs.pipe_file(f"{s3_bucket}/store/{name}", b"evil")
    store.files.fs.pipe_file(f"{s3_bucket}/store/work/k1/step", b"1")
    store.files.fs.pipe_file(f"{s3_bucket}/store/work/k1/finished-{ref.digest}/evil", b"evil")
    work = store.work("k1")
    work.fetch()
    assert read(work.path) == {"step": b"1"}
    assert list(tmp_path.rglob("evil")) == []
    assert [(manifest.kind, manifest.key) for manifest in store.manifests()] == [("gather", "k1")]
    assert verify(store) == (1, [])
    garbage = find_garbage(store, [("gather", "k1")], grace_seconds=3600)
    assert garbage.names == {}
    assert store.find("gather", "k1") == ref


def test_a_link_is_not_published(store: Store, outside: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "link").symlink_to(outside / "k1.json")
    with pytest.raises(ValueError, match="link is neither a file nor a folder"):
        store.publish("gather", "k1", folder, LINEAGE)
    assert list(store.places()) == []
