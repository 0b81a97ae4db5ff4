"""Looking after a store: what is damaged is found and withdrawn, what nobody needs is named, where things come from."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from storage.faults import StoreError
from storage.manifest import ArtifactRef, InputRecord, Lineage, RunName
from storage.runs import Needed, kept_runs, new_run, read_runs, write_run
from storage.store import Store
from storage.upkeep import delete, find_garbage, find_key, origins, verify

Publish = Callable[..., ArtifactRef]
LONG_AGO = time.time() - 7200


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def publish(store: Store, tmp_path: Path) -> Publish:
    """Publishes a file of ``content`` under ``key``, made of ``inputs``."""

    def make(kind: str, key: str, content: str = "x", **inputs: ArtifactRef) -> ArtifactRef:
        folder = tmp_path / f"{kind}-{key}"
        folder.mkdir()
        (folder / "file").write_text(content)
        records = {name: InputRecord(digest=ref.digest, kind=ref.kind, key=ref.key) for name, ref in inputs.items()}
        lineage = Lineage(
            stage=kind,
            version=1,
            inputs=records or {"text": InputRecord(digest="t", facts={"name": "text.txt", "revision": "c0ffee"})},
            settings={},
            packages={},
            device="cpu",
            run=RunName(id="r", name="run"),
            seconds=1.0,
        )
        return store.publish(kind, key, folder, lineage)

    return make


@pytest.fixture
def chain(publish: Publish) -> list[ArtifactRef]:
    """Returns tokens, two Grams of them, and the bases of the first."""
    tokens = publish("calibrate", "a0", "tokens")
    first, second = publish("gather", "b0", "one", tokens=tokens), publish("gather", "b1", "two", tokens=tokens)
    return [tokens, first, second, publish("bases", "c0", "bases", grams=first, tokens=tokens)]


def age(store: Store) -> None:
    for path in Path(store.uri).rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))


def names(store: Store, *needed: tuple[str, str], grace: float = 0.0) -> set[str]:
    return set(find_garbage(store, needed, grace_seconds=grace).names)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "manifest"])
def test_verify_finds_damage_and_withdraws_it(damage: str, store: Store, chain: list[ArtifactRef]) -> None:
    assert verify(store) == (4, [])
    file = Path(store.uri) / "payload" / chain[1].digest / "file"
    if damage == "flip":
        file.write_text("onf")
    elif damage == "cut":
        file.write_text("o")
    elif damage == "delete":
        file.unlink()
    else:
        (Path(store.uri) / "manifest" / "gather" / "b0.json").write_text("{}")
    fresh = Store(store.uri)
    if damage == "flip":
        assert fresh.find("gather", "b0") is not None  # a size alone cannot tell
        assert Store(store.uri, verify=True).find("gather", "b0") is None
    count, (found,) = verify(fresh)
    assert (count, found.kind, found.key) == (4, "gather", "b0")
    assert fresh.find("gather", "b0") is None
    assert verify(Store(store.uri)) == (3, [])


def test_a_key_is_found_by_its_beginning(store: Store, chain: list[ArtifactRef]) -> None:
    assert find_key(store, "c").key == "c0"
    with pytest.raises(StoreError, match=r"2 keys start with 'b'.*give more"):
        find_key(store, "b")
    for prefix in ("z", ""):
        with pytest.raises(StoreError, match=r"no artifact .* starts with"):
            find_key(store, prefix)


def test_the_tree_reaches_what_came_from_outside(store: Store, chain: list[ArtifactRef]) -> None:
    tree = list(origins(store, store.manifest("bases", "c0")))
    assert [(o.depth, o.name, o.record.key, o.seen) for o in tree] == [
        (1, "grams", "b0", False),
        (2, "tokens", "a0", False),
        (3, "text", None, False),
        (1, "tokens", "a0", True),
    ]
    assert tree[2].record.facts == {"name": "text.txt", "revision": "c0ffee"}
    store.withdraw("calibrate", "a0")
    assert [o.manifest is None for o in origins(store, store.manifest("bases", "c0"))] == [False, True, True]


def test_garbage_is_what_is_no_input_of_what_is_needed(store: Store, chain: list[ArtifactRef]) -> None:
    garbage = find_garbage(store, {("bases", "c0")}, grace_seconds=0)
    assert [manifest.key for manifest in garbage.artifacts] == ["b1"]
    assert set(garbage.names) == {"manifest/gather/b1.json", f"payload/{chain[2].digest}"}
    assert garbage.num_bytes == len("two")
    delete(store, garbage, grace_seconds=0)
    assert store.find("gather", "b1") is None
    assert verify(store) == (3, [])
    assert names(store, ("bases", "c0")) == set()


def test_a_payload_that_another_artifact_shares_stays(store: Store, publish: Publish) -> None:
    publish("gather", "d0", "same")
    publish("gather", "d1", "same")
    assert names(store, ("gather", "d0")) == {"manifest/gather/d1.json"}


def test_what_is_young_or_locked_stays(store: Store, chain: list[ArtifactRef]) -> None:
    work = store.work("e0")
    work.fetch()
    (work.path / "step").write_text("123")
    (Path(store.uri) / "payload" / "orphan").mkdir()
    (Path(store.uri) / "payload" / "orphan" / "file").write_text("12")
    everything = {"manifest/gather/b1.json", f"payload/{chain[2].digest}", "work/e0", "payload/orphan"}
    assert names(store, ("bases", "c0"), grace=3600) == set()
    age(store)
    assert names(store, ("bases", "c0"), grace=3600) == everything
    with FileLock(work.path.with_name("e0.lock")):
        age(store)
        assert names(store, ("bases", "c0"), grace=3600) == everything - {"work/e0"}
    assert "work/e0" not in names(store, ("bases", "c0"), ("measure", "e0"))  # a run that ended wants to continue


def test_runs_come_back_newest_first_and_damage_is_said(store: Store) -> None:
    for name in ("first", "second"):
        run = new_run(name, name)
        write_run(store, run.model_copy(update={"needs": (Needed(kind="gather", key=name),)}))
    assert [run.id for run in read_runs(store)] == ["second", "first"]
    assert read_runs(store)[0].needs == (Needed(kind="gather", key="second"),)
    (Path(store.uri) / "run" / "third.json").write_text("{")
    with pytest.raises(StoreError, match=r"run/third.json .* is damaged.* delete it"):
        read_runs(store)


def test_unfinished_runs_are_kept_beside_the_newest_finished_ones() -> None:
    old, new = new_run("old", "old"), new_run("new", "new")
    killed = new_run("killed", "killed")
    forgotten = killed.model_copy(update={"id": "forgotten", "started": "2020-01-01T00:00:00.000000+00:00"})
    done = [run.model_copy(update={"finished": True}) for run in (new, old)]
    assert [run.id for run in kept_runs([killed, *done, forgotten], 1)] == ["new", "killed"]
    assert [run.id for run in kept_runs([killed, *done, forgotten], 0)] == ["killed"]


def test_gc_does_nothing_while_a_manifest_does_not_read(store: Store, chain: list[ArtifactRef]) -> None:
    (Path(store.uri) / "manifest" / "gather" / "b0.json").write_text("{}")
    with pytest.raises(StoreError, match=r"gather b0 do not read: run `store verify` first"):
        find_garbage(store, [], grace_seconds=0)


def test_what_came_to_life_meanwhile_is_not_deleted(store: Store, chain: list[ArtifactRef], publish: Publish) -> None:
    garbage = find_garbage(store, {("bases", "c0")}, grace_seconds=0)
    publish("gather", "b2", "two")  # the payload of the one that is garbage
    delete(store, garbage, grace_seconds=0)
    assert (store.find("gather", "b1"), store.find("gather", "b2") is None) == (None, False)
    young = find_garbage(store, {("bases", "c0")}, grace_seconds=0)
    delete(store, young, grace_seconds=3600)
    assert store.find("gather", "b2") is not None


def test_what_a_kill_left_is_garbage(store: Store, chain: list[ArtifactRef]) -> None:
    work = store.work("c0")  # of an artifact that is published
    work.fetch()
    (work.path / "step").write_text("123")
    left = ["probe-1", "run/r.json.1.tmp", "manifest/gather/b0.json.1.tmp", "results/gone"]
    for name in left:
        (Path(store.uri) / name).parent.mkdir(exist_ok=True)
        (Path(store.uri) / name).write_text("1")
    garbage = find_garbage(store, {("bases", "c0"), ("gather", "b1")}, grace_seconds=0)
    assert set(garbage.names) == {*left, "work/c0"}
    assert garbage.num_bytes == len(left) + 3
    delete(store, garbage, grace_seconds=0)
    assert names(store, ("bases", "c0"), ("gather", "b1")) == set()
    assert verify(store) == (4, [])
