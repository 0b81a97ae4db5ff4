"""``python -m flows store list|show|verify|gc``."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from flows.server import import_prefect
from storage.faults import StoreError
from storage.manifest import InputRecord, Manifest
from storage.runs import kept_runs, read_runs
from storage.store import Store
from storage.upkeep import Origin, delete, find_garbage, find_key, origins, verify
from tasks.places import BLOCK, open_store
from tasks.progress import Progress

SHORT = 12  # digits of a key that are shown


def list_artifacts(place: str, kind: str | None, *, as_json: bool) -> None:
    """Prints the artifacts of a store, or of one ``kind`` of them, the newest first."""
    store = existing_store(place)
    manifests = [manifest for manifest in store.manifests() if kind in (None, manifest.kind)]
    manifests.sort(key=lambda manifest: manifest.created, reverse=True)
    if as_json:
        print(json.dumps([manifest.model_dump(mode="json", exclude={"files"}) for manifest in manifests]))
        return
    print(f"{'stage':10} {'key':{SHORT}} {'size':>9} {'took':>9}  {'made':25} run")
    for manifest in manifests:
        lineage = manifest.lineage
        run = "" if lineage.run is None else lineage.run.name
        print(
            f"{manifest.kind:10} {manifest.key[:SHORT]} {decimal(manifest.num_bytes):>9} {lineage.seconds:7.1f} s  "
            f"{manifest.created:25} {run}"
        )
    payloads = {manifest.digest: manifest.num_bytes for manifest in manifests}
    print(f"{len(manifests)} artifacts, {decimal(sum(payloads.values()))} in {len(payloads)} payloads")


def show(place: str, prefix: str, *, as_json: bool) -> None:
    """Prints one artifact and the tree of what it was made of."""
    store = existing_store(place)
    manifest = find_key(store, prefix)
    tree = list(origins(store, manifest))
    if as_json:
        print(json.dumps({**manifest.model_dump(mode="json"), "origins": [_origin(origin) for origin in tree]}))
        return
    lineage = manifest.lineage
    print(f"{manifest.kind} {manifest.key}")
    print(f"  made      {manifest.created} in {lineage.seconds:.1f} s on {lineage.device}" + _by(manifest))
    print(f"  version   {lineage.version} of {lineage.stage}")
    print(f"  settings  {json.dumps(lineage.settings)}")
    print(f"  packages  {', '.join(f'{name} {number}' for name, number in lineage.packages.items())}")
    print(f"  payload   {store.files.uri_of(f'payload/{manifest.digest}')}")
    for name, facts in manifest.files.items():
        print(f"    {decimal(facts.size):>9}  {name}")
    print("  made of")
    for origin in tree:
        print(f"  {'  ' * origin.depth}{origin.name}: {_line(origin)}")


def verify_store(place: str, *, as_json: bool) -> int:
    """Digests every artifact, withdraws the damaged ones and says which; returns the exit status: 1 if any was."""
    store = existing_store(place)
    with Progress("store verify") as progress:
        count, damaged = verify(store, progress)
    if as_json:
        print(json.dumps({"artifacts": count, "damaged": [asdict(damage) for damage in damaged]}))
        return int(bool(damaged))
    for damage in damaged:
        print(f"{damage.kind} {damage.key[:SHORT]}: {damage.problem}; withdrawn, the next run computes it again")
    print(f"{count} artifacts, {len(damaged)} damaged")
    return int(bool(damaged))


def collect(
    place: str, *, last: int | None, reports: Sequence[Path], grace_hours: float, delete_: bool, as_json: bool
) -> None:
    """Prints what neither the ``last`` runs nor ``reports`` need, and deletes it if asked to.

    Errors: ``ValueError`` if nothing says what to keep, or if a report does not read.
    """
    if last is None and not reports:
        raise ValueError("say what to keep: --last N for the newest N runs, --report PATH for what a report needs")
    store = existing_store(place)
    runs = kept_runs(read_runs(store), last or 0)
    needed = {(need.kind, need.key) for run in runs for need in run.needs}
    for path in reports:
        needs = _needs_of(path)
        if not any(store.find(kind, key) for kind, key in needs):
            raise ValueError(f"{path} is of another store: nothing that it needs is in {store.uri!r}")
        needed |= needs
    garbage = find_garbage(store, needed, grace_seconds=3600 * grace_hours)
    if delete_:
        delete(store, garbage, grace_seconds=3600 * grace_hours)
    if as_json:
        listed = [{"kind": manifest.kind, "key": manifest.key} for manifest in garbage.artifacts]
        facts = {"artifacts": listed, "names": garbage.names, "num_bytes": garbage.num_bytes, "deleted": delete_}
        print(json.dumps(facts))
        return
    for run in runs:
        state = "" if run.finished else ", which is not finished,"
        print(f"keeping what run {run.name} of {run.started[:19]}{state} needs: {len(run.needs)} artifacts")
    for path in reports:
        print(f"keeping what {path} needs")
    print(f"keeping what was written within {grace_hours:g} hours (--grace-hours)")
    for kind, count in sorted(Counter(manifest.kind for manifest in garbage.artifacts).items()):
        print(f"  {kind:10} {count:5} artifacts")
    others = [name for name in garbage.names if not name.startswith(("manifest/", "payload/"))]
    if others:
        print(f"  {'leftovers':10} {len(others):5} of unfinished work and records")
    print(f"{decimal(garbage.num_bytes)} {'freed' if delete_ else 'would be freed; --delete frees them'}")


def existing_store(place: str) -> Store:
    """Returns the store at ``place``. Errors: ``StoreError`` if there is no artifact in it."""
    if place.startswith(BLOCK):
        import_prefect()
    store = open_store(place, writable=False)
    if not store.files.names("manifest"):
        raise StoreError(f"there is no artifact in {store.uri!r}: name the store with --store")
    return store


def _needs_of(report: Path) -> set[tuple[str, str]]:
    try:
        stages = json.loads(report.read_text(encoding="utf-8"))["stages"]
        return {(stage["name"], stage["key"]) for stage in stages}
    except OSError as error:
        raise ValueError(f"{report} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{report} is no report: it names no stages; give the report.json of a run") from None


def _by(manifest: Manifest) -> str:
    run = manifest.lineage.run
    return "" if run is None else f" by run {run.name} ({run.id})"


def _line(origin: Origin) -> str:
    record = origin.record
    if record.kind is None or record.key is None:
        facts = ", ".join(f"{name} {_value(value)}" for name, value in record.facts.items() if value is not None)
        return f"{facts or 'from outside the store'} (digest {record.digest[:SHORT]})"
    name = f"{record.kind} {record.key[:SHORT]}"
    if origin.manifest is None:
        return f"{name}, not in the store any more"
    if origin.seen:
        return f"{name} (above)"
    settings = origin.manifest.lineage.settings
    return name + (f" {json.dumps(settings)}" if settings else "")


def _origin(origin: Origin) -> dict[str, Any]:
    record: InputRecord = origin.record
    return {
        "name": origin.name,
        "depth": origin.depth,
        **record.model_dump(mode="json"),
        "in_store": origin.manifest is not None,
        "settings": None if origin.manifest is None else origin.manifest.lineage.settings,
    }


def _value(value: Any) -> str:
    return value[:SHORT] if isinstance(value, str) and len(value) == 64 else repr(value)
