"""Looking after a store: which artifacts are damaged, where one comes from, and what nobody needs any more."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from filelock import FileLock, Timeout

from storage.faults import StoreError
from storage.manifest import InputRecord, Manifest
from storage.store import ArtifactMissing, Store

Place = tuple[str, str]  # kind and key


@dataclass(frozen=True, kw_only=True)
class Damage:
    """An artifact that is not what its manifest says."""

    kind: str
    key: str
    problem: str


def verify(store: Store, progress: Callable[[int, int], None] | None = None) -> tuple[int, list[Damage]]:
    """Reads every byte of every artifact; returns how many were looked at and which are damaged.

    A damaged one is withdrawn: the next run that needs it computes it again.
    """
    places = list(store.places())
    damaged = []
    for done, (kind, key) in enumerate(places, 1):
        try:
            problem = store.problem(store.manifest(kind, key), verify=True)
        except ArtifactMissing:
            problem = "its manifest does not read"
        if problem is not None:
            damaged.append(Damage(kind=kind, key=key, problem=problem))
            store.withdraw(kind, key)
        if progress is not None:
            progress(done, len(places))
    return len(places), damaged


def find_key(store: Store, prefix: str) -> Manifest:
    """Returns the artifact whose key starts with ``prefix``. Errors: ``StoreError`` if there is none, or several."""
    found = [(kind, key) for kind, key in store.places() if key.startswith(prefix)]
    if not found or not prefix:
        raise StoreError(f"no artifact in {store.uri!r} has a key that starts with {prefix!r}: `store list` shows them")
    if len(found) > 1:
        listed = ", ".join(f"{kind} {key[:16]}" for kind, key in found[:5])
        raise StoreError(f"{len(found)} keys start with {prefix!r} ({listed}): give more of it")
    return store.manifest(*found[0])


@dataclass(frozen=True, kw_only=True)
class Origin:
    """One line of an artifact's tree: the input called ``name`` of the artifact above it, ``depth`` levels down."""

    name: str
    depth: int
    record: InputRecord
    manifest: Manifest | None  # None: outside the store, or not in it any more
    seen: bool  # its own inputs were listed above


def origins(store: Store, manifest: Manifest) -> Iterator[Origin]:
    """Yields everything that an artifact was made of, depth first, back to what came from outside the store."""
    listed: set[Place] = {(manifest.kind, manifest.key)}

    def below(parent: Manifest, depth: int) -> Iterator[Origin]:
        for name, record in sorted((parent.lineage.inputs | parent.lineage.hints).items()):
            found, seen = None, False
            if record.kind is not None and record.key is not None:
                place = (record.kind, record.key)
                seen = place in listed
                listed.add(place)
                try:
                    found = store.manifest(*place)
                except ArtifactMissing:
                    found = None
            yield Origin(name=name, depth=depth, record=record, manifest=found, seen=seen)
            if found is not None and not seen:
                yield from below(found, depth + 1)

    return below(manifest, 1)


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """What nobody needs: artifacts, and names of folders and files with their sizes in bytes."""

    artifacts: list[Manifest]
    names: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.names.values())


def find_garbage(store: Store, needed: Iterable[Place], *, grace_seconds: float) -> Garbage:
    """Returns what is neither in ``needed`` nor an input, however far back, of what is.

    Whatever was written within ``grace_seconds`` stays, as does work that a process has locked. Errors: ``StoreError``
    while a manifest does not read: nobody knows what it belongs to.
    """
    manifests = {(manifest.kind, manifest.key): manifest for manifest in store.manifests()}
    unread = [f"{kind} {key[:12]}" for kind, key in store.places() if (kind, key) not in manifests]
    if unread:
        raise StoreError(f"{store.uri!r}: the manifests of {', '.join(unread)} do not read: run `store verify` first")
    kept = _with_inputs(set(needed), manifests)
    oldest = time.time() - grace_seconds
    artifacts, alive, names = [], set(), {}
    for place, manifest in manifests.items():
        name = f"manifest/{place[0]}/{place[1]}.json"
        if place in kept or not _older(store, name, oldest):
            alive.add(manifest.digest)
        else:
            artifacts.append(manifest)
            names[name] = 0
    for digest in store.files.names("payload"):
        if digest not in alive and _older(store, f"payload/{digest}", oldest):
            names[f"payload/{digest}"] = sum(store.files.sizes(f"payload/{digest}").values())
    for folder in ("run", *(f"manifest/{kind}" for kind in store.files.names("manifest"))):
        for entry in store.files.names(folder):
            name = f"{folder}/{entry}"
            if entry.endswith(".tmp") and _older(store, name, oldest):  # of a process that was killed
                names[name] = sum(store.files.sizes(name).values())
    for entry in store.files.names(""):
        if entry.startswith("probe-") and _older(store, entry, oldest):
            names[entry] = sum(store.files.sizes(entry).values())
    made = {key for _, key in manifests}
    wanted = {"work": {key for _, key in kept} - made, "results": made - {manifest.key for manifest in artifacts}}
    for folder, keys in wanted.items():
        for entry in store.files.names(folder):
            name = f"{folder}/{entry}"
            if entry.removesuffix(".lock") not in keys and _older(store, name, oldest) and not _locked(store, name):
                names[name] = sum(store.files.sizes(name).values())
    return Garbage(artifacts=artifacts, names=names)


def delete(store: Store, garbage: Garbage, *, grace_seconds: float) -> None:
    """Deletes it, manifests first: nothing is ever seen that is half there.

    What has been written since it was found, or is part of an artifact by now, stays.
    """
    oldest = time.time() - grace_seconds
    alive: set[str] | None = None
    for name in sorted(garbage.names, key=lambda name: not name.startswith("manifest/")):
        if not _older(store, name, oldest) or _locked(store, name):
            continue
        if name.startswith("payload/"):
            alive = {manifest.digest for manifest in store.manifests()} if alive is None else alive
            if name.removeprefix("payload/") in alive:
                continue
        store.files.remove(name)


def _with_inputs(needed: set[Place], manifests: dict[Place, Manifest]) -> set[Place]:
    kept: set[Place] = set()
    waiting = list(needed)
    while waiting:
        place = waiting.pop()
        if place in kept:
            continue
        kept.add(place)
        manifest = manifests.get(place)
        if manifest is not None:
            inputs = manifest.lineage.inputs.values()
            waiting += [(i.kind, i.key) for i in inputs if i.kind is not None and i.key is not None]
    return kept


def _older(store: Store, name: str, oldest: float) -> bool:
    return all(written <= oldest for _, written in store.files.infos(name).values())


def _locked(store: Store, name: str) -> bool:
    if not store.files.is_local or not name.startswith("work/"):
        return False
    path = store.files.path(name.removesuffix(".lock") + ".lock")
    if not path.exists():
        return False
    try:
        with FileLock(path).acquire(blocking=False):
            return False
    except Timeout:
        return True
