"""``python -m flows check``: do the figures of a run keep within bounds? The last step of a CI job."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.config import Target
from flows.upkeep import existing_store
from storage.faults import StoreError
from storage.runs import read_runs

OUT_OF_BOUNDS = 1
REPORT = "report.json"  # as ``tasks.report`` has it, which takes seconds to import


def check(
    run: str,
    *,
    store: str | None,
    target: str | None,
    maxima: Mapping[str, float],
    minima: Mapping[str, float],
    as_json: bool,
) -> int:
    """Prints a line for each bound and result of ``run``; returns the exit status, 1 if a bound is not kept.

    ``run``: a ``report.json`` or its folder; with ``store`` the id or the name of a run in it. ``target``: the name of
    one result, such as 0.5-kl; none: every one. ``maxima``, ``minima``: bounds by figure, dots lead into nested ones.
    Errors: ``ValueError`` for a report, a target or a figure that is not there, and where there is nothing to check.
    """
    if not maxima and not minima:
        raise ValueError("there is no bound to check: give --max perplexity=20 or --min accuracy=0.9, for instance")
    results = _read(run) if store is None else _read_from(store, run)
    chosen = {name: result for name, result in results.items() if target in (None, name.partition(" ")[0])}
    if not chosen:
        raise ValueError(f"there is no target {target}: {run} has {', '.join(results) or 'none'}")
    rows = [
        {"target": name, "figure": figure, "value": value, "bound": bound, "kept": kept, "relation": relation}
        for name, result in chosen.items()
        for bounds, relation in ((maxima, "at most"), (minima, "at least"))
        for figure, bound in bounds.items()
        for value in (_figure(result, figure, name),)
        for kept in (value <= bound if relation == "at most" else value >= bound,)
    ]
    if as_json:
        print(json.dumps(rows))
    for row in [] if as_json else rows:
        line = f"{row['target']}: {row['figure']} is {row['value']:g}, to be {row['relation']} {row['bound']:g}"
        print(line if row["kept"] else f"error: {line}", file=sys.stdout if row["kept"] else sys.stderr)
    return 0 if all(row["kept"] for row in rows) else OUT_OF_BOUNDS


def _read(run: str) -> dict[str, dict[str, Any]]:
    path = Path(run) / REPORT if Path(run).is_dir() else Path(run)
    try:
        return dict(_named(json.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; of a run in a store, add --store") from None
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path} is no report: give the {REPORT} of a run, or its folder") from None


def _read_from(place: str, run: str) -> dict[str, dict[str, Any]]:
    """Returns the results of the newest run in the store at ``place`` that has ``run`` for its id or its name."""
    store = existing_store(place)
    record = next((record for record in read_runs(store) if run in (record.id, record.name)), None)
    if record is None:
        raise StoreError(f"there is no run {run} in store {store.uri!r}")
    if not record.finished:
        raise StoreError(f"run {run} in store {store.uri!r} did not finish: see its log, and run it again")
    results: dict[str, dict[str, Any]] = {}
    reports = [need.key for need in record.needs if need.kind == "report"]
    for index, key in enumerate(reports):
        ref = store.find("report", key)
        if ref is None:
            raise StoreError(f"the report of run {run} is not in store {store.uri!r} any more: run again")
        content = json.loads((store.local(ref) / REPORT).read_text(encoding="utf-8"))
        suffix = f" #{index + 1}" if len(reports) > 1 else ""  # one report a seed, in the order of the seeds
        results |= {name + suffix: result for name, result in _named(content)}
    return results


def _named(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each result of a report with the name of its target, and of its seed where there are several."""
    for result in report["results"]:
        bounds = [name for name in ("fit_gib", "max_kl") if name in result]  # from which the ratio follows
        amount = bounds[0] if bounds else "ratio"
        target = Target.model_validate({amount: result[amount], "objective": result["objective"]})
        yield target.name + (f" seed {result['seed']}" if "seed" in result else ""), result


def _figure(result: Mapping[str, Any], figure: str, name: str) -> float:
    value: Any = result
    for part in figure.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        numbers = [key for key, number in result.items() if isinstance(number, (int, float))]
        raise ValueError(f"{name} has no figure {figure}: it has {', '.join(numbers)}")
    return value
