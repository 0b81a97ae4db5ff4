"""report: everything measured -> tables for people, JSON for programs, plots."""

import re
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from storage.manifest import ArtifactRef
from tasks.allocate import ALLOCATION, read_curves
from tasks.artifacts import read_json, read_units, write_json
from tasks.caching import Work, stage
from tasks.efficiency import (
    analytic,
    conditions,
    counted_otherwise,
    efficiency_section,
    is_drawn,
    speeds,
    state_efficiency,
)
from tasks.evaluate import read_evaluation
from tasks.gather import LEFT_ALONE
from tasks.markdown import Rows, markdown_table
from tasks.merge import MERGE
from tasks.metrics import Metric, metric_of
from tasks.models import ModelSource
from tasks.plots import plot_curves, plot_pareto, plot_ranks
from tasks.summary import Result, by_target, spread, target_label
from tasks.train import HISTORY

REPORT = "report.json"
REASON = 120  # characters in the table of stages; the JSON has all
CURVES, RANKS, PARETO = "plots/kl_curves.png", "plots/retained_ranks.png", "plots/pareto.png"
ACCURACIES = {"tasks": "Zero-shot accuracy, %", "transfer": "Transfer accuracy, %"}  # titles by key of an evaluation


@stage()
def report(
    work: Work,
    *,
    prompt: str | None,
    targets: list[dict[str, Any]],
    grams: ArtifactRef,
    bases: ArtifactRef,
    grid: ArtifactRef | None,
    dense: ArtifactRef,
    allocations: list[ArtifactRef],
    untrained: list[ArtifactRef],
    untrained_uniform: list[ArtifactRef],
    trainings: list[ArtifactRef],
    merges: list[ArtifactRef],
    trained: list[ArtifactRef],
    model: ModelSource | None = None,
    device_gib: float | None = None,
    decodes: list[ArtifactRef] | None = None,
) -> None:
    """Publishes ``report.json`` and the plots. The lists hold one reference for each of ``targets``.

    ``model``, of which memory and compute are stated for a device of ``device_gib``: a decoder.
    """
    units = read_units(work.folder(bases))
    results = [
        _with_ratio({**target, **_result(work, *refs)})
        for target, *refs in zip(
            targets, allocations, untrained, untrained_uniform, trainings, merges, trained, strict=True
        )
    ]
    content = {
        "prompt": prompt,
        "dense": read_evaluation(work, dense),
        "units": [
            {
                "name": unit.name,
                "side": unit.side,
                "members": list(unit.members),
                "dimension": unit.dimension,
                "parameters": unit.parameters,
                "block": unit.block,
            }
            for unit in units
        ],
        "left_alone": read_json(work.folder(grams) / LEFT_ALONE),
        "results": results,
    }
    if model is not None and device_gib is not None:
        removed = [result["removed"] for result in results]
        stated = analytic(model, units, removed, device_gib)
        lines = state_efficiency(
            content,
            stated,
            device_gib,
            speeds(work, decodes or []),
            fused=counted_otherwise(units, removed),
            measured_on=conditions(work, decodes or []),
        )
        if lines:
            plot_pareto(lines, metric_of(content["dense"]).title, work.output / PARETO)
    write_json(work.output / REPORT, content)
    plot_ranks(units, {_amount(result): result["removed"] for result in results}, work.output / RANKS)
    if grid is not None:
        plot_curves(read_curves(work, grid, units), work.output / CURVES)


def _with_ratio(result: dict[str, Any]) -> dict[str, Any]:
    """Returns ``result`` with the realized ratio where the target, bound by a divergence, gives none."""
    return {**result, "ratio": result["realized_ratio"]} if result["ratio"] is None else result


def _amount(result: dict[str, Any]) -> str:
    """Returns how much was to be removed, for people."""
    bounds = {"fit_gib": "at most {:g} GiB: ", "max_kl": "at most {:g} nats: "}
    bound = "".join(text.format(result[name]) for name, text in bounds.items() if name in result)
    return f"{bound}{result['ratio']:.0%} removed"


def _result(
    work: Work,
    allocation: ArtifactRef,
    untrained: ArtifactRef,
    uniform: ArtifactRef,
    training: ArtifactRef,
    merge: ArtifactRef,
    trained: ArtifactRef,
) -> dict[str, Any]:
    chosen = read_json(work.folder(allocation) / ALLOCATION)
    before, after = read_evaluation(work, untrained), read_evaluation(work, trained)
    history = read_json(work.folder(training) / HISTORY)
    metric = metric_of(after).name
    result = {
        "allocation": chosen["method"],
        "realized_ratio": chosen["realized_ratio"],
        "removed": chosen["removed"],
        "kl_sum_of_isolated": chosen["kl_sum_of_isolated"],
        "kl_joint": before["kl_joint"],
        f"{metric}_init": before[metric],
        f"{metric}_init_uniform": read_evaluation(work, uniform)[metric],
        metric: after[metric],
        "parameters": after["parameters"],
        "epochs": len(history["history"]) - 1,
        "best_epoch": history["best_epoch"],
        "history": history["history"],
        "merge_error": read_json(work.folder(merge) / MERGE)["largest_error"],
    }
    for name in (*ACCURACIES, "transfer_mean", "similarity", "continuation"):
        if name in after and name not in result:
            result |= {f"{name}_init": before[name], name: after[name]}
    if "sweep" in history:
        chosen_rate = history["settings"]["learning_rate"]
        result |= {"learning_rate": chosen_rate, "validated_on": history["metric"], "sweep": history["sweep"]}
    return result


def markdown(content: dict[str, Any]) -> str:
    """Returns a report, as ``report.json`` holds it, for people to read."""
    dense, results = content["dense"], content["results"]
    metric = metric_of(dense)
    quality = f"{metric.title} {metric.template.format(dense[metric.name])}"
    lines = [
        f"# {content['model']}, compressed",
        "",
        f"Dense: {dense['parameters']:,} parameters, {quality} on {dense[metric.counted]} test {metric.counted}.",
        "",
        explanation(metric),
        "",
        *table(content),
    ]
    lines += ["", "## Learning rates", "", *markdown_table(*sweep_rows(results))] if is_swept(results) else []
    lines += _pictures(content)
    lines += efficiency_section(content, paretos(content))
    for key, title in ACCURACIES.items():
        if dense.get(key):
            lines += ["", f"## {title}", "", *markdown_table(*accuracy_rows(content, key))]
    if content["left_alone"]:
        lines += ["", "## Left alone", ""]
        lines += [f"- `{name}` ({count}): {reason}" for (name, reason), count in left_alone(content).items()]
    if content["prompt"] is not None:
        lines += ["", "## One prompt, continued", "", "```text", side_by_side(content, highest_ratio(results)), "```"]
    if "stages" in content:
        lines += ["", "## Stages of this run", "", *stage_table(content["stages"])]
    return "\n".join(lines) + "\n"


def left_alone(content: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Returns which matrices of the blocks are no part of a unit: how many there are, by name and reason."""
    found: dict[tuple[str, str], int] = {}
    for name, reason in content["left_alone"].items():
        kind = re.sub(r"\.\d+\.", ".*.", name), reason
        found[kind] = found.get(kind, 0) + 1
    return found


def explanation(metric: Metric) -> str:
    """Returns what the columns of the table are."""
    task = "" if metric.task is None else f", LSP-T on {metric.task} (task)"
    return (
        "*Removed* is the share of the targeted layers' parameters. NoLSP is the merged initialization, untrained; "
        f"LSP is trained to match the dense model (kl){task}. {metric.explanation}; "
        f"KL, in nats per {metric.unit}, is that of the untrained model: summed over units cut alone, and of all cuts "
        "at once. Where the best epoch is 0, none was better than the initialization, which is kept."
    )


def table(content: dict[str, Any]) -> list[str]:
    """Returns the table of results as Markdown lines."""
    return markdown_table(*result_rows(content))


def result_rows(content: dict[str, Any]) -> Rows:
    """Returns the results, a row a target; of several seeds mean ± standard deviation."""
    dense, groups = content["dense"], by_target(content["results"])
    metric = metric_of(dense)
    columns: dict[str, tuple[str, str]] = {  # title -> figure, template
        "realized": ("realized_ratio", "{:.2%}"),
        "parameters": ("parameters", "{:,.0f}"),
        "KL isolated": ("kl_sum_of_isolated", "{:.3f}"),
        "KL joint": ("kl_joint", "{:.3f}"),
        "NoLSP uniform": (f"{metric.name}_init_uniform", metric.template),
        "NoLSP": (f"{metric.name}_init", metric.template),
        "LSP": (metric.name, metric.template),
    }
    own = {"parameters": f"{dense['parameters']:,}", "LSP": metric.template.format(dense[metric.name])}
    rate = ["rate"] if is_swept(content["results"]) else []
    rows = [["dense", *(own.get(title, "") for title in columns), "", "", *("" for _ in rate)]]
    for group in groups:
        figures = [spread([result[name] for result in group], template) for name, template in columns.values()]
        epochs = [f"{result['epochs']} (best {result['best_epoch']})" for result in group]
        row = [target_label(group[0]), *figures, group[0]["objective"], ", ".join(dict.fromkeys(epochs))]
        rates = dict.fromkeys(f"{result['learning_rate']:g}" for result in group) if rate else {}
        rows.append([*row, *([", ".join(rates)] if rate else [])])
    return ["removed", *columns, "objective", "epochs", *rate], rows


def stage_table(stages: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what became of each stage of a run as Markdown lines."""
    return markdown_table(*stage_rows(stages))


def stage_rows(stages: Sequence[dict[str, Any]]) -> Rows:
    """Returns what became of each stage of a run."""
    rows = [
        [
            stage["label"],
            stage["state"],
            f"{stage['seconds']:.1f}",
            stage["key"][:12],
            shorten(stage["reason"] or "", REASON, placeholder=" ..."),
        ]
        for stage in stages
    ]
    return ["stage", "state", "seconds", "key", "computed because"], rows


def is_swept(results: Sequence[Result]) -> bool:
    """Whether several learning rates were tried."""
    return any("sweep" in result for result in results)


def sweep_rows(results: Sequence[Result]) -> Rows:
    """Returns what every learning rate validated at, for each target."""
    seeds = any("seed" in result for result in results)
    header = ["removed", "objective", *(["seed"] if seeds else []), "rate", "validated on", "validation", "best epoch"]
    rows = []
    for result in results:
        target = [f"{result['ratio']:.0%}", result["objective"], *([str(result["seed"])] if seeds else [])]
        for tried in result["sweep"]:
            kept = "kept" if tried["learning_rate"] == result["learning_rate"] else ""
            kept = "diverged" if "diverged" in tried and not kept else kept
            figures = [f"{tried['learning_rate']:g}", result["validated_on"], f"{tried['validation']:.4g}"]
            rows.append([*target, *figures, str(tried["best_epoch"]), kept])
    return [*header, ""], rows


def _pictures(content: dict[str, Any]) -> list[str]:
    lines = []
    for seed in content.get("seeds", [None]):
        of_seed = "" if seed is None else f", seed {seed}"
        lines += ["", f"![retained ranks{of_seed}]({seeded(RANKS, seed)})"]
        lines += ["", f"![KL curves{of_seed}]({seeded(CURVES, seed)})"] if has_curves(content) else []
    return lines


def has_curves(content: dict[str, Any]) -> bool:
    """Whether ranks were allocated by a measured grid."""
    return any(result["kl_sum_of_isolated"] is not None for result in content["results"])


def paretos(content: dict[str, Any]) -> list[str]:
    """Returns where the pictures of quality against costs are, one a seed."""
    return [seeded(PARETO, seed) for seed in content.get("seeds", [None]) if is_drawn(content, seed)]


def seeded(path: str, seed: int | None) -> str:
    """Returns where a file of one seed is among those of several; None: of a run without others."""
    folder, _, name = path.rpartition("/")
    return path if seed is None else f"{folder}/seed-{seed}/{name}"


def accuracy_rows(content: dict[str, Any], key: str) -> Rows:
    """Returns the accuracies that ``ACCURACIES`` calls by ``key``: a column a task, rows before and after training."""
    dense = content["dense"][key]
    rows = [["dense", "", *(_accuracy([dense], name) for name in dense)]]
    for group in by_target(content["results"]):
        for label, figures in (("NoLSP", f"{key}_init"), (model_label(group[0]["objective"]), key)):
            accuracies = [_accuracy([result[figures] for result in group], name) for name in dense]
            rows.append([label, f"{group[0]['ratio']:.0%}", *accuracies])
    return ["model", "removed", *dense], rows


def side_by_side(content: dict[str, Any], ratio: float) -> str:
    """Returns the prompt and its ``continuations`` at ``ratio`` for people."""
    lines = [f"{label}\n{_indented(text)}" for label, text in continuations(content, ratio).items()]
    return "\n\n".join([f"prompt\n{_indented(content['prompt'])}", *lines])


def highest_ratio(results: Sequence[Result]) -> float:
    """Returns the highest ratio of the targets, of several seeds the first's."""
    return max(float(group[0]["ratio"]) for group in by_target(results))


def continuations(content: dict[str, Any], ratio: float) -> dict[str, str]:
    """Returns how the dense model, NoLSP and LSP at ``ratio`` continue the prompt, by what they are called."""
    results = [group[0] for group in by_target(content["results"]) if group[0]["ratio"] == ratio]
    shown = {"dense": content["dense"]["continuation"], f"NoLSP at {ratio:.0%}": results[0]["continuation_init"]}
    return shown | {f"{model_label(result['objective'])} at {ratio:.0%}": result["continuation"] for result in results}


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip("\n").split("\n"))


def model_label(objective: str) -> str:
    return "LSP" if objective == "kl" else "LSP-T"


def _accuracy(metrics: Sequence[dict[str, dict[str, float]]], name: str) -> str:
    values = [100 * one[name]["acc"] if "acc" in one[name] else None for one in metrics]
    return spread(values, "{:.1f}")
