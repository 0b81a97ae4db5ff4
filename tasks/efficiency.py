"""What a compressed decoder costs to run, before and after: analytic figures, and the measured speed of decoding."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lsp_core.decode_report import GIB
from lsp_core.decode_settings import ARMS, DENSE, READY, TUNED
from lsp_core.efficiency import efficiency as figures
from lsp_core.efficiency import fused_members
from lsp_core.units import Unit
from storage.manifest import ArtifactRef
from tasks.artifacts import read_json
from tasks.caching import Work
from tasks.decode import DECODE
from tasks.markdown import Rows, markdown_table
from tasks.metrics import metric_of
from tasks.models import ModelSource, load_skeleton
from tasks.plots import Line
from tasks.summary import Result, by_target, spread, target_label

log = logging.getLogger(__name__)

ANALYTIC = {  # column -> figure, template
    "weights, GiB": ("weights_gib", "{:.3g}"),
    "KV floats a token and layer": ("kv_floats_per_token_per_layer", "{:,.0f}"),
    "weights + KV, GiB": ("weights_plus_kv_128k_gib", "{:.3g}"),
    "longest context, k": ("max_context_k_tokens", "{:,.1f}"),
    "prefill, TFLOP": ("prefill_tflop_2k", "{:.3g}"),
    "decode, GFLOP": ("decode_gflop_2k", "{:.3g}"),
}
PARAMETERS, CONTEXT, SPEED = "parameters", "max_context_k_tokens", "tokens_per_second"
ANALYTIC_NOTE = (
    "2 bytes a parameter and a cached number; weights + KV at 131,072 tokens and batch 8, the longest context at batch "
    "8 on a device of {:g} GiB, 6 of them kept free; FLOPs at a context of 2,048, for a whole prompt and for one token."
)
FUSED_NOTE = (
    "Of layers that make query, key and value in one, one latent is counted as cached; a LatentCache holds their keys "
    "and values whole."
)
SPEED_NOTE = (
    "Tokens per second, and times the dense model's in the same run. *untied*: a factor pair of its own for every "
    "layer, of the same size in all; *ready*: made ready for decoding; *latent*: ours, made ready, with the latent "
    "cache as well, its keys rebuilt or kept rotated; *tuned*: compiled, in a CUDA graph, and times the dense model so "
    "tuned. Of several contexts the picture shows the shortest, and each model at its gain over the dense model in its "
    "own run."
)

PEAKS = "Peak memory of a step, weights and cache included, GiB:"
NO_PEAKS = "Peak memory: not measured on a CPU."


def analytic(
    model: ModelSource, units: Sequence[Unit], removed: Sequence[Mapping[str, int]], device_gib: float
) -> list[dict[str, Any]] | None:
    """Returns the figures of the dense model, and with each of ``removed``; None, logged, where they cannot be told."""
    skeleton = load_skeleton(model)
    try:
        return [asdict(figures(skeleton, units, counts, device_gib=device_gib)) for counts in ({}, *removed)]
    except ValueError as error:
        log.warning("memory and compute are not stated: %s", error)
        return None


def counted_otherwise(units: Sequence[Unit], removed: Iterable[Mapping[str, int]]) -> bool:
    """Whether what is counted as cached is less than what a ``LatentCache`` holds."""
    return any(fused_members(units, counts) for counts in removed)


def speeds(work: Work, decodes: Sequence[ArtifactRef]) -> list[dict[str, Any]]:
    """Returns what was measured of each target: by context and arm, tokens a second and how many times dense."""
    return [_speeds(read_json(work.folder(ref) / DECODE)) for ref in decodes]


def conditions(work: Work, decodes: Sequence[ArtifactRef]) -> dict[str, Any] | None:
    """Returns what was measured on, which is the same for all targets, and the arms that were not, by reason."""
    return _conditions([read_json(work.folder(ref) / DECODE) for ref in decodes])


def _speeds(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cell in content["cells"]:
        found[str(cell["context"])] = {
            row["name"]: {
                "tokens_per_second": row["tokens_per_second"]["median"],
                "speedup": _over_dense(row),
                "cache_bytes": row["cache_bytes"],
                "weights_bytes": row["weights_bytes"],
                "peak_bytes": row["peak_bytes"],
            }
            for row in cell["arms"]
            if row["reason"] is None
        }
    return found


def _over_dense(row: Mapping[str, Any]) -> float | None:
    """Returns how many times as fast as dense an arm is, a tuned one as dense tuned; None where that did not run."""
    if row["name"] == DENSE:
        return 1.0
    tuned = row["name"].endswith(TUNED) and row["name"] != DENSE + TUNED
    gain = row["speedup"].get(DENSE + TUNED if tuned else DENSE)
    return None if gain is None else float(gain["median"])


def _conditions(contents: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if not contents:
        return None
    names = ("machine", "threads", "torch", "dtype", "batch")
    reasons: dict[str, list[str]] = {}
    for content in contents:
        for cell in content["cells"]:
            for row in cell["arms"]:
                if row["reason"] is not None:
                    reasons.setdefault(row["reason"], []).append(f"{row['name']} at context {cell['context']}")
    failed = next((content["reason"] for content in contents if "reason" in content), None)
    found = {name: contents[0][name] for name in names}
    return {**found, "failed": failed, "reasons": {why: list(dict.fromkeys(arms)) for why, arms in reasons.items()}}


def state_efficiency(
    content: dict[str, Any],
    stated: Sequence[dict[str, Any]] | None,
    device_gib: float,
    measured: Sequence[dict[str, Any]],
    *,
    fused: bool = False,
    measured_on: Mapping[str, Any] | None = None,
) -> dict[str, list[Line]]:
    """Adds what the models cost to run to a report's ``content``; returns quality against it, by what it is.

    ``stated``: as ``analytic`` gives them, ``fused``: as ``counted_otherwise``; ``measured``: as ``speeds``, empty
    where speed is not asked for, ``measured_on``: as ``conditions``.
    """
    results, panels = content["results"], {}
    if stated is not None:
        content["device_gib"] = device_gib
        content["fused_cache"] = fused
        for owner, one in zip((content["dense"], *results), stated, strict=True):
            owner["efficiency"] = one
        title = f"longest context, thousands of tokens, {device_gib:g} GiB, batch 8"
        panels[title] = quality_against(content, CONTEXT)
    for result, one in zip(results, measured, strict=bool(measured)):
        result["speed"] = one
    if measured_on is not None:
        content["decoding"] = dict(measured_on)
    if has_speeds(results):
        panels[speed_title(results)] = quality_against(content, SPEED)
    return panels


def is_drawn(content: Mapping[str, Any], seed: int | None) -> bool:
    """Whether there is a picture of the run of ``seed``, None of a run without others."""
    results = [result for result in content["results"] if seed is None or result["seed"] == seed]
    return "efficiency" in content["dense"] or has_speeds(results)


def speed_title(results: Sequence[Result]) -> str:
    """Returns what an axis of speeds is called."""
    return f"tokens per second, context {_shortest(results[0])}, scaled to one dense run"


def has_speeds(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the dense model and ours were measured at the shortest context of all results."""
    timed = [result.get("speed") for result in results]
    return all(one and {DENSE, READY} <= one[min(one, key=int)].keys() for one in timed)


def efficiency_section(content: Mapping[str, Any], pictures: Sequence[str]) -> list[str]:
    """Returns what the models cost to run, as Markdown lines; of other models than decoders nothing."""
    lines = []
    if "efficiency" in content["dense"]:
        notes = [line for note in analytic_notes(content) for line in (note, "")]
        lines += ["", "## Memory and compute, from the shapes", "", *notes, *markdown_table(*analytic_rows(content))]
    if is_timed(content):
        lines += ["", "## Decoding, measured", *(line for note in speed_notes(content) for line in ("", note))]
        for note, rows in speed_tables(content):
            lines += [*(["", note] if note else []), *([] if rows is None else ["", *markdown_table(*rows)])]
    if lines:
        lines += [line for path in pictures for line in ("", f"![quality against context and speed]({path})")]
    return lines


def analytic_notes(content: Mapping[str, Any]) -> list[str]:
    """Returns what the figures of ``analytic_rows`` are, a paragraph an entry."""
    return [ANALYTIC_NOTE.format(content["device_gib"]), *([FUSED_NOTE] if content.get("fused_cache") else [])]


def is_timed(content: Mapping[str, Any]) -> bool:
    """Whether the speed of decoding was asked for."""
    return any("speed" in result for result in content["results"])


def speed_notes(content: Mapping[str, Any]) -> list[str]:
    """Returns what the figures of ``speed_tables`` are and what they were measured on, a paragraph an entry."""
    return [SPEED_NOTE, *_measured_on(content)]


def _measured_on(content: Mapping[str, Any]) -> list[str]:
    found = content.get("decoding")
    if found is None:
        return []
    setting = f"On {found['machine']}, torch {found['torch']}, in {found['dtype']}, batch {found['batch']}."
    reasons = [f"Not measured: {', '.join(arms)} ({reason})." for reason, arms in found["reasons"].items()]
    failed = [] if found["failed"] is None else [f"Not measured: {found['failed']}."]
    return [setting, *reasons, *failed]


def analytic_rows(content: Mapping[str, Any]) -> Rows:
    """Returns memory and compute of each model, from its shapes."""
    dense = content["dense"]["efficiency"]
    rows = [["dense", *(template.format(dense[name]) for name, template in ANALYTIC.values())]]
    for group in by_target(content["results"]):
        shown = [spread([one["efficiency"][name] for one in group], form) for name, form in ANALYTIC.values()]
        rows.append([_label(group[0]), *shown])
    return ["removed", *ANALYTIC], rows


def _label(result: Result) -> str:
    return f"{target_label(result)} {result['objective']}"


def speed_tables(content: Mapping[str, Any]) -> list[tuple[str, Rows | None]]:
    """Returns the measured speeds and peaks of memory, a note and a table each; no table where there are none."""
    if not any(result["speed"] for result in content["results"]):
        return []
    return [("", _speed_rows(content)), (PEAKS, _peak_rows(content)) if _has_peaks(content) else (NO_PEAKS, None)]


def _speed_rows(content: Mapping[str, Any]) -> Rows:
    def cell(arm: str, known: Sequence[Mapping[str, Any]]) -> str:
        rate = spread([one["tokens_per_second"] for one in known], "{:.1f}")
        gain = "" if arm == DENSE else spread([one["speedup"] for one in known], "{:.2f}")
        return f"{rate} ({gain} x)" if gain else rate

    return _rows_of_arms(content, cell)


def _has_peaks(content: Mapping[str, Any]) -> bool:
    arms = [arm for result in content["results"] for one in result["speed"].values() for arm in one.values()]
    return any(arm.get("peak_bytes") for arm in arms)


def _peak_rows(content: Mapping[str, Any]) -> Rows:
    def cell(_: str, known: Sequence[Mapping[str, Any]]) -> str:
        return spread([None if (peak := one.get("peak_bytes")) is None else peak / GIB for one in known], "{:.2f}")

    return _rows_of_arms(content, cell)


def _rows_of_arms(content: Mapping[str, Any], cell: Callable[[str, Sequence[Mapping[str, Any]]], str]) -> Rows:
    """Returns a row for each target and context, with what ``cell`` says of each arm and its figures, by seed."""
    timed = {arm for result in content["results"] for one in result["speed"].values() for arm in one}
    arms = [arm for arm in ARMS if arm in timed]
    rows = []
    for group in by_target(content["results"]):
        for context in dict.fromkeys(context for result in group for context in result["speed"]):
            measured = [result["speed"].get(context, {}) for result in group]
            known = {arm: [one[arm] for one in measured if arm in one] for arm in arms}
            rows.append([_label(group[0]), context, *(cell(arm, known[arm]) if known[arm] else "" for arm in arms)])
    return ["removed", "context", *arms], rows


def quality_against(content: Mapping[str, Any], figure: str) -> list[Line]:
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
            x = [_dense(content, figure), *(_compressed(content, one, figure) for one in ordered)]
            y = [quality, *(one[name] for one in ordered)]
            lines.append(Line(label=label, x=x, y=y, notes=["dense", *(f"{one['ratio']:.0%}" for one in ordered)]))
    return lines


def _dense(content: Mapping[str, Any], figure: str) -> float:
    """Returns the figure of the dense model; its speed is that of the first run, at the shortest context."""
    if figure == SPEED:
        return _rate(content["results"][0], DENSE)
    return _of_shapes(content["dense"], figure)


def _compressed(content: Mapping[str, Any], result: Result, figure: str) -> float:
    """Returns the figure of one model; its speed is its gain in its own run, on the dense speed of the first run."""
    if figure != SPEED:
        return _of_shapes(result, figure)
    return _dense(content, figure) * (_rate(result, READY) / _rate(result, DENSE))


def _of_shapes(figures: Mapping[str, Any], figure: str) -> float:
    """Returns the figure of a model that its shapes alone tell."""
    return float(figures[PARAMETERS] if figure == PARAMETERS else figures["efficiency"][figure])


def _rate(result: Mapping[str, Any], arm: str) -> float:
    return float(result["speed"][_shortest(result)][arm][SPEED])


def _shortest(result: Mapping[str, Any]) -> str:
    return min(result["speed"], key=int)
