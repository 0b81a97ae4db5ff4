"""What a compressed decoder costs to run, before and after: analytic figures, and the measured speed of decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lsp_core.decode_settings import DENSE, KINDS, READY
from lsp_core.efficiency import efficiency as figures
from lsp_core.units import Unit
from storage.manifest import ArtifactRef
from tasks.artifacts import read_json
from tasks.caching import Work
from tasks.decode import DECODE
from tasks.markdown import markdown_table
from tasks.metrics import metric_of
from tasks.models import ModelSource, load_skeleton
from tasks.plots import Line
from tasks.summary import Result, by_target, spread

ANALYTIC = {  # column -> figure, template
    "weights, GiB": ("weights_gib", "{:.3g}"),
    "KV floats a token and layer": ("kv_floats_per_token_per_layer", "{:,.0f}"),
    "weights + KV, GiB": ("weights_plus_kv_128k_gib", "{:.3g}"),
    "longest context, k": ("max_context_k_tokens", "{:,.1f}"),
    "prefill, TFLOP": ("prefill_tflop_2k", "{:.3g}"),
    "decode, GFLOP": ("decode_gflop_2k", "{:.3g}"),
}
CONTEXT, SPEED = "max_context_k_tokens", "tokens_per_second"
ANALYTIC_NOTE = (
    "2 bytes a parameter and a cached number; weights + KV at 131,072 tokens and batch 8, the longest context at batch "
    "8 on a device of {:g} GiB, 6 of them kept free; FLOPs at a context of 2,048, for a whole prompt and for one token."
)
SPEED_NOTE = (
    "Tokens per second, and times the dense model's in the same run. *untied*: a factor pair of its own for every "
    "layer, of the same size in all; *ready*: ours made ready for decoding; *latent*: with the latent cache as well, "
    "its keys rebuilt or kept rotated. Of several contexts the picture shows the shortest."
)


def analytic(
    model: ModelSource, units: Sequence[Unit], removed: Sequence[Mapping[str, int]], device_gib: float
) -> list[dict[str, Any]] | None:
    """Returns the figures of the dense model, and with each of ``removed``; None where the cache cannot be counted."""
    skeleton = load_skeleton(model)
    try:
        return [asdict(figures(skeleton, units, counts, device_gib=device_gib)) for counts in ({}, *removed)]
    except ValueError:  # the trace did not tell which layers make keys and values
        return None


def speeds(work: Work, decodes: Sequence[ArtifactRef]) -> list[dict[str, Any]]:
    """Returns what was measured of each target: by context and arm, tokens a second and how many times dense."""
    return [_speeds(read_json(work.folder(ref) / DECODE)) for ref in decodes]


def _speeds(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cell in content["cells"]:
        arms = {row["name"]: row for row in cell["arms"] if row["reason"] is None}
        found[str(cell["context"])] = {
            name: {
                "tokens_per_second": row["tokens_per_second"]["median"],
                "speedup": row["speedup"]["dense"]["median"] if "dense" in row["speedup"] else 1.0,
                "cache_bytes": row["cache_bytes"],
                "weights_bytes": row["weights_bytes"],
            }
            for name, row in arms.items()
        }
    return found


def state_efficiency(
    content: dict[str, Any],
    stated: Sequence[dict[str, Any]] | None,
    device_gib: float,
    measured: Sequence[dict[str, Any]],
) -> dict[str, list[Line]]:
    """Adds what the models cost to run to a report's ``content``; returns quality against it, by what it is.

    ``stated``: as ``analytic`` gives them; ``measured``: as ``speeds`` does, empty where speed is not asked for.
    """
    results, panels = content["results"], {}
    if stated is not None:
        content["device_gib"] = device_gib
        for owner, one in zip((content["dense"], *results), stated, strict=True):
            owner["efficiency"] = one
        title = f"longest context, thousands of tokens, {device_gib:g} GiB, batch 8"
        panels[title] = _lines(content, CONTEXT)
    for result, one in zip(results, measured, strict=bool(measured)):
        result["speed"] = one
    if measured:
        panels[f"tokens per second, context {_shortest(results[0])}"] = _lines(content, SPEED)
    return panels


def efficiency_section(content: Mapping[str, Any], pictures: Sequence[str]) -> list[str]:
    """Returns what the models cost to run, as Markdown lines; of other models than decoders nothing."""
    lines = []
    if "efficiency" in content["dense"]:
        note = ANALYTIC_NOTE.format(content["device_gib"])
        lines += ["", "## Memory and compute, from the shapes", "", note, "", *_analytic_table(content)]
    if any("speed" in result for result in content["results"]):
        lines += ["", "## Decoding, measured", "", SPEED_NOTE, "", *_speed_table(content)]
    if lines:
        lines += [line for path in pictures for line in ("", f"![quality against context and speed]({path})")]
    return lines


def _analytic_table(content: Mapping[str, Any]) -> list[str]:
    dense = content["dense"]["efficiency"]
    rows = [["dense", *(template.format(dense[name]) for name, template in ANALYTIC.values())]]
    for group in by_target(content["results"]):
        shown = [spread([one["efficiency"][name] for one in group], form) for name, form in ANALYTIC.values()]
        rows.append([f"{group[0]['ratio']:.0%} {group[0]['objective']}", *shown])
    return markdown_table(["removed", *ANALYTIC], rows)


def _speed_table(content: Mapping[str, Any]) -> list[str]:
    rows = []
    arms = [
        arm for arm in KINDS if any(arm in one for result in content["results"] for one in result["speed"].values())
    ]
    for group in by_target(content["results"]):
        for context in group[0]["speed"]:
            measured = [result["speed"][context] for result in group]
            cells = []
            for arm in arms:
                known = [one[arm] for one in measured if arm in one]
                rate = spread([one["tokens_per_second"] for one in known], "{:.1f}") if known else ""
                gain = f" ({known[0]['speedup']:.2f} x)" if len(known) == 1 and arm != DENSE else ""
                cells.append(rate + gain)
            rows.append([f"{group[0]['ratio']:.0%} {group[0]['objective']}", context, *cells])
    return markdown_table(["removed", "context", *arms], rows)


def _lines(content: Mapping[str, Any], figure: str) -> list[Line]:
    """Returns quality against ``figure``, a line for NoLSP and for each objective, the dense model first on each."""
    metric = metric_of(content["dense"]).name
    quality = content["dense"][metric]
    results: list[Result] = [group[0] for group in by_target(content["results"])]
    lines = []
    for label, name, chosen in (
        ("NoLSP", f"{metric}_init", {result["ratio"]: result for result in results}.values()),
        ("LSP", metric, [result for result in results if result["objective"] == "kl"]),
        ("LSP-T", metric, [result for result in results if result["objective"] == "task"]),
    ):
        ordered = sorted(chosen, key=lambda result: result["ratio"])
        if ordered:
            first = ordered[0]
            x = [_at(content["dense"], first, DENSE, figure), *(_at(one, one, READY, figure) for one in ordered)]
            y = [quality, *(one[name] for one in ordered)]
            lines.append(Line(label=label, x=x, y=y, notes=["dense", *(f"{one['ratio']:.0%}" for one in ordered)]))
    return lines


def _at(owner: Mapping[str, Any], timed: Mapping[str, Any], arm: str, figure: str) -> float:
    """Returns the figure of one model; speeds are those at the shortest context."""
    return float(owner["efficiency"][figure] if figure == CONTEXT else timed["speed"][_shortest(timed)][arm][SPEED])


def _shortest(result: Mapping[str, Any]) -> str:
    return min(result["speed"], key=int)
