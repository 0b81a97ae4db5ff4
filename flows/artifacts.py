"""What a run shows in Prefect beside its log: the plan, the results, the ranks, the curves, the stages, the files.

Each is one small artifact under a key of its own, so that the UI lists its versions run by run. None may end a run.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.plan import Step, states
from flows.prepared import Runner
from storage.faults import first_line
from storage.grid import MEASURED, KLGrid
from storage.store import Store
from tasks.markdown import code, markdown_table

log = logging.getLogger(__name__)

ROWS = 50  # of a table; the report has all
POINTS = 50  # of a line in a chart


def show_markdown(key: str, lines: Callable[[], Sequence[str]], description: str) -> None:
    """Publishes the lines that ``lines`` makes; a failure of either is a warning in the log."""
    with _display(key):
        create_markdown_artifact("\n".join(lines()), key=key, description=description)


def show_table(key: str, rows: Callable[[], list[dict[str, Any]]], description: str) -> None:
    """Publishes the first ``ROWS`` rows that ``rows`` makes; a failure is a warning in the log."""
    with _display(key):
        create_table_artifact(rows()[:ROWS], key=key, description=description)


@contextmanager
def _display(key: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a display must not end hours of work
        log.warning("%s cannot be shown in Prefect (%s)", key, first_line(error))


def show_plan(store: Store, describe: Callable[[Runner], object], model: str) -> None:
    """Publishes what a run that ``describe`` describes will take from the store and what it will compute."""
    show_markdown("plan", lambda: plan_lines(states(store, describe)), f"{model}: plan")


def plan_lines(steps: Sequence[Step]) -> list[str]:
    """Returns what a run will take from the store and what it will compute, and why, as Markdown lines.

    What is unknown depends on a stage that is computed first.
    """
    found = [step.state for step in steps]
    counted = ", ".join(f"{found.count(state)} {state}" for state in ("hit", "miss", "unknown"))
    shown = sorted(steps, key=lambda step: step.state == "hit")[:ROWS] if len(steps) > ROWS else steps
    rows = [[step.label, step.state, (step.key or "")[:12], step.reason.replace("|", "\\|")] for step in shown]
    left = [f"... and {len(steps) - ROWS} more"] if len(steps) > ROWS else []
    return [f"Of {len(steps)} stages: {counted}.", "", *markdown_table(["stage", "state", "key", "why"], rows), *left]


def stage_rows(stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what became of each stage of a run, what was computed first where they are too many to show."""
    ordered = sorted(stages, key=lambda one: one["state"] == "Cached") if len(stages) > ROWS else stages
    return [
        {
            "stage": one["label"],
            "state": one["state"],
            "seconds": one["seconds"],
            "key": one["key"][:12],
            "computed because": one["reason"] or "",
        }
        for one in ordered
    ]


def allocation_lines(units: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the share of directions that each kind of unit keeps, by target, and the profile over the blocks."""
    lines, dimensions = [], {unit["name"]: unit["dimension"] for unit in units}
    chosen = {_target(result): result["removed"] for result in results}
    kinds: dict[str, list[str]] = {}
    for unit in units:
        kinds.setdefault(kind_of(unit["name"]), []).append(unit["name"])

    def kept(removed: dict[str, int], names: Sequence[str]) -> list[float]:
        return [1 - removed[name] / dimensions[name] for name in names]

    rows = []
    for kind, names in kinds.items():
        for target, removed in chosen.items():
            shares = kept(removed, names)
            figures = [f"{value:.1%}" for value in (fmean(shares), min(shares), max(shares))]
            rows.append([code(kind), str(len(names)), target, *figures])
    lines += markdown_table(["units", "number", "target", "kept", "least", "most"], rows[:ROWS])
    blocks = sorted({unit["block"] for unit in units})
    if len(blocks) > 1:
        by_block = {block: [unit["name"] for unit in units if unit["block"] == block] for block in blocks}
        profile = {
            target: [fmean(kept(removed, by_block[block])) for block in blocks] for target, removed in chosen.items()
        }
        lines += ["", *chart("Share of directions kept, by block", "block", blocks, profile)]
    return lines


def curve_lines(grid: Path) -> list[str]:
    """Returns what cutting each kind of unit alone costs, in nats per token: means over the blocks.

    ``grid``: the folder of a KL grid. Points that were not measured count in no mean; the chart has the shares at which
    every kind was measured.
    """
    with KLGrid.open(str(grid)).read() as data:
        kl, status = data["kl"].values, data["status"].values
        names, fractions = [str(name) for name in data["unit"].values], [float(x) for x in data["fraction"].values]
    kinds: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        kinds.setdefault(kind_of(name), []).append(row)
    means: dict[str, list[float | None]] = {}
    for kind, members in kinds.items():
        columns = [[float(kl[row, p]) for row in members if status[row, p] == MEASURED] for p in range(len(fractions))]
        means[kind] = [fmean(column) if column else None for column in columns]
    rows = [
        [code(kind), str(len(kinds[kind])), *("" if value is None else f"{value:.3g}" for value in values)]
        for kind, values in means.items()
    ]
    header = ["units", "number", *(f"{fraction:.0%}" for fraction in fractions)]
    common = [p for p, column in enumerate(zip(*means.values(), strict=True)) if None not in column]
    lines = markdown_table(header, rows[:ROWS])
    if len(common) > 1:
        measured = {kind: [values[p] or 0.0 for p in common] for kind, values in means.items()}
        positions = [round(100 * fractions[p]) for p in common]
        lines += ["", *chart("KL, nats per token, by share removed", "removed, %", positions, measured)]
    return lines


def chart(title: str, axis: str, positions: Sequence[int], lines: dict[str, list[float]]) -> list[str]:
    """Returns a Mermaid chart with a line for each of ``lines``, which are listed below it in the order drawn."""
    step = -(-len(positions) // POINTS)
    top = max(value for values in lines.values() for value in values) or 1.0
    return [
        "```mermaid",
        "xychart-beta",
        f'    title "{title}"',
        f'    x-axis "{axis}" [{", ".join(str(position) for position in positions[::step])}]',
        f"    y-axis 0 --> {top:.3g}",
        *(f"    line [{', '.join(f'{value:.4g}' for value in values[::step])}]" for values in lines.values()),
        "```",
        "",
        "Lines, in this order: " + ", ".join(code(name) for name in lines),
    ]


def file_lines(output: Path, store: str, checkpoints: Sequence[str]) -> list[str]:
    """Returns where a run's report, checkpoints and artifacts are: paths on the machine that ran it."""
    reports = [output / name for name in ("report.html", "report.md", "report.json", "config.yaml")]
    found = [["report", path.resolve()] for path in reports if path.is_file()]
    rows = [*found, *(["checkpoint", path] for path in checkpoints), ["store", store]]
    return markdown_table(["what", "where"], [[name, code(str(path))] for name, path in rows])


def kind_of(name: str) -> str:
    """Returns the name of a unit or layer without the number of its block."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)


def _target(result: dict[str, Any]) -> str:
    seed = f", seed {result['seed']}" if "seed" in result else ""
    return f"{result['ratio']:.0%} {result['objective']}{seed}"
