"""The cells of an ablation: their figures as the stages published them, and their table."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.manifest import ArtifactRef
from tasks.allocate import ALLOCATION
from tasks.artifacts import read_json
from tasks.evaluate import EVALUATION
from tasks.markdown import markdown_table
from tasks.metrics import metric_of
from tasks.plots import Dot
from tasks.report import ACCURACIES, stage_table
from tasks.summary import deviation, spread
from tasks.train import HISTORY

Row = dict[str, Any]
EXPLANATION = (
    "Every setting that is not a column is the same in all cells. NoLSP is the merged initialization, untrained; LSP "
    "is trained, on the objective of its row. The best cell of each ratio is in bold."
)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A figure of every cell; ``higher_is_better`` is None where neither is."""

    title: str
    name: str
    template: str
    higher_is_better: bool | None


def read_cell(
    folder: Callable[[ArtifactRef], Path],
    allocation: ArtifactRef,
    untrained: ArtifactRef,
    training: ArtifactRef,
    trained: ArtifactRef,
) -> Row:
    """Returns the figures of one compressed model; ``folder`` gives the files of an artifact."""
    before, after = read_json(folder(untrained) / EVALUATION), read_json(folder(trained) / EVALUATION)
    history = read_json(folder(training) / HISTORY)
    metric = metric_of(after).name
    row = {
        "realized_ratio": read_json(folder(allocation) / ALLOCATION)["realized_ratio"],
        "parameters": after["parameters"],
        "kl_joint": before["kl_joint"],
        f"{metric}_init": before[metric],
        metric: after[metric],
        "best_epoch": history["best_epoch"],
        "learning_rate": history["settings"]["learning_rate"],
    }
    tasks = [figures for key in ACCURACIES for figures in after.get(key, {}).values()]
    accuracies = [figures["acc"] for figures in tasks if "acc" in figures]
    return row | ({"task_accuracy": statistics.fmean(accuracies)} if accuracies else {})


def rows_of(values: Sequence[Mapping[str, Any]], results: Sequence[list[Row]]) -> list[Row]:
    """Returns a row for each cell: the values of its axes, its figures, and of which columns it is the best.

    ``results``: the figures of every seed, cell by cell. Of several seeds a row has the means, their standard
    deviations as ``std``, and what they are of as ``results``.
    """
    rows: list[Row] = []
    for chosen, figures in zip(values, results, strict=True):
        if len(figures) == 1:
            rows.append({**chosen, **figures[0]})
            continue
        values_of = {name: [one[name] for one in figures] for name in figures[0]}
        means = {name: statistics.fmean(numbers) for name, numbers in values_of.items()}
        spreads = {name: deviation(numbers) for name, numbers in values_of.items()}
        rows.append({**chosen, **means, "std": spreads, "results": figures})
    for row in rows:
        rivals = [rival for rival in rows if rival["ratio"] == row["ratio"]]
        row["best"] = [column.name for column in columns(row) if _is_best(row, rivals, column)]
    return rows


def columns(figures: Mapping[str, Any]) -> list[Column]:
    """Returns the columns for figures, those of a row or of the dense model."""
    metric = metric_of(figures)
    higher, template = metric.higher_is_better, metric.template
    found = [
        Column(title="realized", name="realized_ratio", template="{:.2%}", higher_is_better=None),
        Column(title="KL joint", name="kl_joint", template="{:.3f}", higher_is_better=False),
        Column(title="NoLSP", name=f"{metric.name}_init", template=template, higher_is_better=higher),
        Column(title="LSP", name=metric.name, template=template, higher_is_better=higher),
    ]
    if "task_accuracy" in figures:
        found.append(
            Column(title="mean accuracy", name="task_accuracy", template="{:.2%}", higher_is_better=True),
        )
    return found


def ablation_table(content: Mapping[str, Any]) -> list[str]:
    """Returns the table of cells as Markdown lines."""
    axes, dense = content["axes"], content["dense"]
    shown = columns(content["rows"][0])
    metric = metric_of(dense)
    own = {metric.name: metric.template.format(dense[metric.name])}
    lines = [["dense", *("" for _ in axes[1:]), *(own.get(column.name, "") for column in shown)]]
    for row in content["rows"]:
        figures = []
        for column in shown:
            text = spread([one[column.name] for one in row.get("results", [row])], column.template)
            figures.append(f"**{text}**" if column.name in row["best"] else text)
        lines.append([*(axis_text(axis, row[axis]) for axis in axes), *figures])
    return markdown_table([*axes, *(column.title for column in shown)], lines)


def dots(content: Mapping[str, Any]) -> tuple[dict[str, list[Dot]], float, str]:
    """Returns what is plotted: the cells of each ratio by its title, the dense model's figure, and what it is."""
    metric = metric_of(content["dense"])
    axes = [axis for axis in content["axes"] if axis != "ratio" and len({row[axis] for row in content["rows"]}) > 1]
    panels: dict[str, list[Dot]] = {}
    for row in content["rows"]:
        dot = Dot(
            label=", ".join(f"{axis} {axis_text(axis, row[axis])}" for axis in axes),
            untrained=row[f"{metric.name}_init"],
            trained=row[metric.name],
            deviation=row.get("std", {}).get(metric.name, 0.0),
        )
        panels.setdefault(f"{axis_text('ratio', row['ratio'])} removed", []).append(dot)
    return panels, content["dense"][metric.name], metric.title


def spread_lines(content: Mapping[str, Any]) -> list[str]:
    """Returns how far the realized ratios of the cells of each ratio lie apart, as a sentence each."""
    ratios: dict[Any, list[float]] = {}
    for row in content["rows"]:
        realized = [one["realized_ratio"] for one in row.get("results", [row])]
        ratios.setdefault(row["ratio"], []).extend(realized)
    return [
        f"Realized ratios at {axis_text('ratio', ratio)}: {min(realized):.2%} to {max(realized):.2%}, "
        f"{100 * (max(realized) - min(realized)):.2f} points apart."
        for ratio, realized in ratios.items()
    ]


def ablation_markdown(content: Mapping[str, Any], picture: str) -> str:
    """Returns an ablation for people to read; ``picture`` is the path of its plot."""
    metric = metric_of(content["dense"])
    lines = [f"# {content['model']}, ablated", "", f"{EXPLANATION} {metric.explanation}.", "", *ablation_table(content)]
    lines += ["", *spread_lines(content), "", f"![LSP of every cell]({picture})"]
    lines += ["", "## Stages of this run", "", *stage_table(content["stages"])]
    return "\n".join(lines) + "\n"


def axis_text(axis: str, value: Any) -> str:
    """Returns the value of an axis, for people."""
    if axis == "ratio" and isinstance(value, float):
        return f"{value:.0%}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_best(row: Row, rivals: Sequence[Row], column: Column) -> bool:
    if column.higher_is_better is None:
        return False
    choose = max if column.higher_is_better else min
    return bool(row[column.name] == choose(rival[column.name] for rival in rivals))
