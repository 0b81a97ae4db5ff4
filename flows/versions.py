"""versions: which stages' source has changed since it was recorded, and the record brought up to date."""

import json
from collections.abc import Sequence
from pathlib import Path

from tasks.sources import ROOTS, Sources
from tasks.versions import RECORD, REMEDY, Standing, refresh, standings


def versions(
    *,
    bump: bool = False,
    same_result: bool = False,
    as_json: bool = False,
    record: Path = RECORD,
    roots: Sequence[Path] = ROOTS,
) -> int:
    """Prints each stage's version and what has changed in its source since it was recorded; returns the exit status.

    That is 1 if any has changed, else 0. ``bump`` and ``same_result`` bring the record up to date, then print what has
    changed and return 0: ``bump`` gives each changed stage a new version, so that its artifacts are computed anew;
    ``same_result`` leaves the versions, on the author's word that the outputs are the same.
    Errors: ``ValueError`` if both are asked for.
    """
    if bump and same_result:
        raise ValueError("--bump and --same-result exclude each other: the outputs are the same, or they are not")
    sources = Sources(roots)
    refreshes = bump or same_result
    found = refresh(sources, bump=bump, record=record) if refreshes else standings(sources, record)
    changed = any(standing.changes for standing in found.values())
    if as_json:
        print(json.dumps({stage: _facts(standing) for stage, standing in found.items()}))
    else:
        for stage, standing in found.items():
            print(f"{stage:24} {_line(standing)}")
            for change in standing.changes:
                print(f"    {change}")
        if refreshes and not found:
            print("nothing has changed since the record")
        elif changed and not refreshes:
            print(f"\nthe source has changed since the record: {REMEDY}")
    return int(changed and not refreshes)


def _line(standing: Standing) -> str:
    if standing.now is None:
        return "gone"
    if standing.before is None or standing.before == standing.now:
        return f"version {standing.now}" + ("" if standing.changes else "  ok")
    return f"version {standing.before} -> {standing.now}"


def _facts(standing: Standing) -> dict[str, object]:
    return {
        "recorded_version": standing.before,
        "version": standing.now,
        "ok": not standing.changes,
        "changes": list(standing.changes),
    }
