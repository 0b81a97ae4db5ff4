"""report: everything measured -> tables for people, JSON for programs, plots."""

from typing import Any

from storage.manifest import ArtifactRef
from tasks.allocate import ALLOCATION, read_curves
from tasks.artifacts import read_json, read_units, write_json
from tasks.caching import Work, stage
from tasks.evaluate import read_evaluation
from tasks.merge import MERGE
from tasks.plots import plot_curves, plot_ranks
from tasks.train import HISTORY

REPORT = "report.json"
EXPLANATION = (
    "*Removed* is the share of the targeted layers' parameters. NoLSP is the merged initialization, untrained; "
    "LSP is trained to match the dense model (kl), LSP-T on the text itself (task). Perplexity is on the test text; "
    "KL, in nats per token, is that of the untrained model: summed over units cut alone, and of all cuts at once."
)
CURVES, RANKS = "plots/kl_curves.png", "plots/retained_ranks.png"


@stage()
def report(
    work: Work,
    *,
    prompt: str | None,
    targets: list[dict[str, Any]],
    bases: ArtifactRef,
    grid: ArtifactRef | None,
    dense: ArtifactRef,
    allocations: list[ArtifactRef],
    untrained: list[ArtifactRef],
    untrained_uniform: list[ArtifactRef],
    trainings: list[ArtifactRef],
    merges: list[ArtifactRef],
    trained: list[ArtifactRef],
) -> None:
    """Publishes ``report.json`` and the plots. The lists hold one reference for each of ``targets``."""
    units = read_units(work.folder(bases))
    results = [
        {**target, **_result(work, *refs)}
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
        "results": results,
    }
    write_json(work.output / REPORT, content)
    by_ratio = {f"{result['ratio']:.0%} removed": result["removed"] for result in results}
    plot_ranks(units, by_ratio, work.output / RANKS)
    if grid is not None:
        plot_curves(read_curves(work, grid, units), work.output / CURVES)


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
    result = {
        "allocation": chosen["method"],
        "realized_ratio": chosen["realized_ratio"],
        "removed": chosen["removed"],
        "kl_sum_of_isolated": chosen["kl_sum_of_isolated"],
        "kl_joint": before["kl_joint"],
        "perplexity_init": before["perplexity"],
        "perplexity_init_uniform": read_evaluation(work, uniform)["perplexity"],
        "perplexity": after["perplexity"],
        "parameters": after["parameters"],
        "epochs": len(history["history"]) - 1,
        "best_epoch": history["best_epoch"],
        "history": history["history"],
        "merge_error": read_json(work.folder(merge) / MERGE)["largest_error"],
    }
    for name in ("tasks", "continuation"):
        if name in after:
            result |= {f"{name}_init": before[name], name: after[name]}
    return result


def markdown(content: dict[str, Any]) -> str:
    """Returns a report, as ``report.json`` holds it, for people to read."""
    dense, results = content["dense"], content["results"]
    size = f"{dense['parameters']:,} parameters"
    lines = [
        f"# {content['model']}, compressed",
        "",
        f"Dense: {size}, perplexity {dense['perplexity']:.2f} on {dense['tokens']} test tokens.",
        "",
        EXPLANATION,
        "",
        *table(content),
        "",
        f"![retained ranks]({RANKS})",
    ]
    if any(result["kl_sum_of_isolated"] is not None for result in results):
        lines += ["", f"![KL curves]({CURVES})"]
    names = list(dense.get("tasks", {}))
    if names:
        rows = [["dense", "", *(_accuracy(dense["tasks"][name]) for name in names)]]
        for result in results:
            for label, key in (("NoLSP", "tasks_init"), (model_label(result["objective"]), "tasks")):
                rows.append([label, f"{result['ratio']:.0%}", *(_accuracy(result[key][name]) for name in names)])
        lines += ["", "## Zero-shot accuracy, %", "", *_markdown_table(["model", "removed", *names], rows)]
    if content["prompt"] is not None:
        highest = max(result["ratio"] for result in results)
        lines += ["", "## One prompt, continued", "", "```text", side_by_side(content, highest), "```"]
    if "stages" in content:
        rows = [
            [stage["label"], stage["state"], f"{stage['seconds']:.1f}", stage["key"][:12], stage["reason"] or ""]
            for stage in content["stages"]
        ]
        lines += [
            "",
            "## Stages of this run",
            "",
            *_markdown_table(["stage", "state", "seconds", "key", "computed because"], rows),
        ]
    return "\n".join(lines) + "\n"


def table(content: dict[str, Any]) -> list[str]:
    """Returns the table of results as Markdown lines."""
    header = [
        "removed",
        "realized",
        "parameters",
        "KL isolated",
        "KL joint",
        "NoLSP uniform",
        "NoLSP",
        "LSP",
        "objective",
        "epochs",
    ]
    dense = content["dense"]
    rows = [["dense", "", f"{dense['parameters']:,}", "", "", "", "", f"{dense['perplexity']:.2f}", "", ""]]
    for result in content["results"]:
        isolated = result["kl_sum_of_isolated"]
        rows.append(
            [
                f"{result['ratio']:.0%}",
                f"{result['realized_ratio']:.2%}",
                f"{result['parameters']:,}",
                "" if isolated is None else f"{isolated:.3f}",
                f"{result['kl_joint']:.3f}",
                f"{result['perplexity_init_uniform']:.2f}",
                f"{result['perplexity_init']:.2f}",
                f"{result['perplexity']:.2f}",
                result["objective"],
                f"{result['epochs']} (best {result['best_epoch']})",
            ]
        )
    return _markdown_table(header, rows)


def side_by_side(content: dict[str, Any], ratio: float) -> str:
    """Returns the prompt's continuations by the dense model, NoLSP and LSP at ``ratio``."""
    results = [result for result in content["results"] if result["ratio"] == ratio]
    shown = {"dense": content["dense"]["continuation"], f"NoLSP at {ratio:.0%}": results[0]["continuation_init"]}
    shown |= {f"{model_label(result['objective'])} at {ratio:.0%}": result["continuation"] for result in results}
    lines = [f"prompt\n{_indented(content['prompt'])}"]
    lines += [f"{label}\n{_indented(text)}" for label, text in shown.items()]
    return "\n\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip("\n").split("\n"))


def model_label(objective: str) -> str:
    return "LSP" if objective == "kl" else "LSP-T"


def _accuracy(metrics: dict[str, float]) -> str:
    return f"{100 * metrics['acc']:.1f}" if "acc" in metrics else ""


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, *rows]
    ]
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]
