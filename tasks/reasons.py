"""Why a stage runs: what differs from the nearest thing that was computed before."""

from collections.abc import Iterator, Mapping
from typing import Any

from storage.digest import canonical_json
from storage.manifest import InputRecord, Manifest
from storage.store import ArtifactMissing, Store
from tasks.caching import Arguments, Stage, input_records

COMPARED = 64  # manifests, the newest; a store may hold thousands
SHOWN = 60  # characters of a value


def why(store: Store, stage: Stage, inputs: Mapping[str, Any], settings: Arguments, run: str | None = None) -> str:
    """Returns what changed since the nearest artifact of the same stage, or that there is none.

    ``run``: the id of this run, whose own artifacts say nothing about what has changed.
    """
    records = input_records(inputs)
    nearest: list[str] | None = None
    for manifest in _newest(store, stage, run):
        changes = list(_changes(manifest, stage, records, settings))
        if nearest is None or len(changes) < len(nearest):
            nearest = changes
    if nearest is None:
        return "none like it in the store"
    return "; ".join(nearest) if nearest else "the earlier one is damaged"


def begun(store: Store, key: str) -> str:
    """Returns what to add to a reason where an earlier run has left work that is gone on from."""
    return "; goes on from an unfinished run" if any(store.work(key).path.glob("*")) else ""


def _newest(store: Store, stage: Stage, run: str | None) -> Iterator[Manifest]:
    infos = store.files.infos(f"manifest/{stage.name}")
    keys = [name.removesuffix(".json") for name in infos if name.endswith(".json")]
    keys.sort(key=lambda key: infos[f"{key}.json"][1], reverse=True)
    for key in keys[:COMPARED]:
        try:
            manifest = store.manifest(stage.name, key)
        except ArtifactMissing:  # damaged, or deleted meanwhile
            continue
        maker = manifest.lineage.run
        if manifest.lineage.stage == stage.function.__name__ and (maker is None or maker.id != run):
            yield manifest


def _changes(manifest: Manifest, stage: Stage, inputs: Mapping[str, InputRecord], settings: Arguments) -> Iterator[str]:
    before = manifest.lineage
    if before.version != stage.version:
        yield f"stage version {before.version} → {stage.version}"
    for name in dict.fromkeys((*before.inputs, *inputs)):
        old, new = before.inputs.get(name), inputs.get(name)
        if old is None or new is None:
            yield f"{name} is {'read as well' if old is None else 'not read'}"
        elif old.digest != new.digest:
            parts = [f"{name}.{change}" for change in _values(old.facts, new.facts)]
            yield ", ".join(parts) or f"{name} changed ({old.digest[:12]} → {new.digest[:12]})"
    yield from _values(before.settings, settings)


def _values(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if (name in old, canonical_json(old.get(name))) != (name in new, canonical_json(new.get(name))):
            before, after = (_short(values[name]) if name in values else "unset" for values in (old, new))
            yield f"{name} {before} → {after}"


def _short(value: Any) -> str:
    text = value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
