"""The version of each stage, on record in ``versions.json`` beside a digest of the source that it stands for.

A stage whose source is no longer the one on record is *changed*. Its author says which it is: another output, hence a
new version, under which nothing is found in any store; or the same output, hence the old version for the new source.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tasks.sources import Sources, source_digest

RECORD = Path(__file__).with_name("versions.json")
REMEDY = "run `python -m flows versions --bump`, or `--same-result` where every output stays the same"
SHORT = 12  # hexadecimal digits, enough to tell what changed; the full digest decides whether anything did

Entries = dict[str, dict[str, Any]]  # by stage: version, source (sha256), covers ({definition: short digest})


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a stage stands to the record: its versions there, ``before`` and ``now``, and what changed in its source.

    ``before`` is None for a stage that is not on record, ``now`` is None for one that is no longer in the source.
    """

    before: int | None
    now: int | None
    changes: tuple[str, ...]


def recorded_version(function: Callable[..., Any]) -> int:
    """Returns the version of the stage that ``function`` computes. Errors: ``ValueError`` if it is not on record."""
    stage = _short_name(f"{function.__module__}.{function.__name__}")
    entries = read_record(RECORD)
    if stage not in entries:
        raise ValueError(f"stage {stage} is not on record in {RECORD}: add it by `python -m flows versions --bump`")
    version: int = entries[stage]["version"]
    return version


@cache
def read_record(path: Path) -> Entries:
    """Returns the entries of the record at ``path``, read once. Errors: ``ValueError`` if it is not JSON."""
    try:
        entries: Entries = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}): resolve its conflicts, or get it from version control"
        ) from None
    return entries


def current_entries(sources: Sources, record: Path = RECORD) -> Entries:
    """Returns what the record would hold for the source as it is, every stage with the version it has there.

    A stage that is new starts at 1, or where stages are gone at the highest version of these: it may be one of them
    under another name, and must find nothing that an older source made.
    """
    recorded = read_record(record)
    names = {_short_name(function): function for function in sources.stages()}
    gone = [entry["version"] for stage, entry in recorded.items() if stage not in names]
    entries: Entries = {}
    for stage, function in names.items():
        covered = sources.covered(function)
        entries[stage] = {
            "version": recorded[stage]["version"] if stage in recorded else max(gone, default=1),
            "source": source_digest(covered),
            "covers": {name: digest[:SHORT] for name, digest in covered.items()},
        }
    return entries


def standings(sources: Sources, record: Path = RECORD) -> dict[str, Standing]:
    """Returns how every stage, in the source or on record, stands to the record, by name."""
    recorded, current = read_record(record), current_entries(sources, record)
    return {
        stage: Standing(
            before=recorded[stage]["version"] if stage in recorded else None,
            now=current[stage]["version"] if stage in current else None,
            changes=tuple(_changes(recorded.get(stage), current.get(stage))),
        )
        for stage in sorted({*recorded, *current})
    }


def refresh(sources: Sources, *, bump: bool, record: Path = RECORD) -> dict[str, Standing]:
    """Writes the source as it is to the record, with ``bump`` every changed stage a version higher.

    Returns what it changed, by stage.
    """
    recorded, entries = read_record(record), current_entries(sources, record)
    found = {stage: standing for stage, standing in standings(sources, record).items() if standing.changes}
    gone = [stage for stage in recorded if stage not in entries]
    for stage in found:
        if bump and stage in entries and (stage in recorded or gone):
            entries[stage]["version"] += 1
    _write(record, entries)
    return {
        stage: Standing(
            before=standing.before,
            now=entries[stage]["version"] if stage in entries else None,
            changes=standing.changes,
        )
        for stage, standing in found.items()
    }


def _changes(recorded: dict[str, Any] | None, current: dict[str, Any] | None) -> Iterator[str]:
    if recorded is None:
        yield "new: not on record"
    elif current is None:
        yield "gone: on record only"
    elif recorded["source"] != current["source"]:
        before, now = recorded.get("covers", {}), current["covers"]
        if not before:
            yield "its source was never recorded"
        elif before == now:
            yield "the digest of its source is not that of the definitions on record"
        else:
            yield from (f"changed: {name}" for name in now if name in before and now[name] != before[name])
            yield from (f"used now: {name}" for name in now if name not in before)
            yield from (f"no longer used: {name}" for name in before if name not in now)


def _short_name(function: str) -> str:
    return function.removeprefix("tasks.")


def _write(path: Path, entries: Entries) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(entries, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    read_record.cache_clear()
