"""The figures of the HTML report: plotly's data and layout, with colours for light and dark, and the same as tables.

Names in them come from outside, and plotly reads some HTML in its texts, so they are escaped here.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb, sample_colorscale

from tasks.efficiency import ANALYTIC, PARAMETERS, SPEED, has_speeds, quality_against, speed_title
from tasks.markdown import Rows
from tasks.metrics import metric_of
from tasks.summary import Result, by_target, target_label

SCHEMES = ("light", "dark")
BACKGROUND = {"light": "#ffffff", "dark": "#161b22"}  # of a figure; every colour has a contrast of 3 or more to it
INK = {"light": ("#1f2328", "#d9dee4"), "dark": ("#e6edf3", "#30363d")}  # text, lines of the grid
SERIES = {
    "light": ("#0b62b0", "#c2410c", "#0f7b55", "#8b3fb0", "#b0124e", "#6b6300", "#0e7490", "#7a4a21"),
    "dark": ("#6cb6ff", "#ff9d66", "#4fd3a0", "#d49cf5", "#ff84a8", "#d8c84a", "#4fd0e6", "#d9ad84"),
}
ORDERED, SPAN = "Plasma", {"light": (0.05, 0.62), "dark": (0.43, 0.98)}  # the scale of ordered series, the part used
MOST_TICKS = 12  # of an axis of blocks
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
COSTS = (PARAMETERS, *(name for name, _ in ANALYTIC.values() if name.startswith(("kv", "weights_plus", "max"))), SPEED)
COST_TITLES = {PARAMETERS: "parameters", **{name: title for title, (name, _) in ANALYTIC.items()}}
FEW_EPOCHS = 12  # up to so many, each has a tick of its own
LINES = ("NoLSP", "LSP", "LSP-T")  # of a cost; the first one's points say the share removed
LEGEND_ROW, PLOT_HEIGHT = 20, 330  # pixels
Curves = Mapping[str, Sequence[tuple[int, float]]]  # by unit: removed count, KL in nats


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure by its ``title``; ``table`` has its numbers for those who do not see it, unless the page has them."""

    title: str
    figure: dict[str, Any]
    table: Rows | None


def shown(name: object) -> str:
    """Returns a name as a text of plotly's that shows it as it is."""
    return html.escape(str(name), quote=False).replace("%", "&#37;")  # %{...} is a template of plotly's


def templates() -> dict[str, Any]:
    """Returns plotly's template of each scheme."""
    return {scheme: _template(*INK[scheme], BACKGROUND[scheme]).to_plotly_json() for scheme in SCHEMES}


def _template(ink: str, grid: str, background: str) -> go.layout.Template:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "tickcolor": grid, "automargin": True}
    axis["title"] = {"standoff": 10}
    return go.layout.Template(
        layout={
            "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": ink},
            "paper_bgcolor": background,
            "plot_bgcolor": background,
            "hoverlabel": {"bgcolor": background, "bordercolor": grid, "font": {"color": ink}},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": ink, "activecolor": ink},
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def ordered_colours(count: int) -> dict[str, list[str]]:
    """Returns ``count`` colours for series that have an order, by scheme."""
    found = {}
    for scheme, (first, last) in SPAN.items():
        places = [first + (last - first) * index / max(1, count - 1) for index in range(count)]
        found[scheme] = sample_colorscale(ORDERED, places)
    return found


def series_colours(count: int) -> dict[str, list[str]]:
    """Returns ``count`` colours for series without an order, by scheme; they repeat after eight."""
    return {
        scheme: [f"rgb{hex_to_rgb(colours[i % len(colours)])}" for i in range(count)]
        for scheme, colours in SERIES.items()
    }


def _chart(
    title: str, traces: Sequence[go.Scatter], colours: Mapping[str, list[str]], legend: str, layout: dict[str, Any]
) -> Chart:
    """Returns the figure of ``traces``, of which number i has colour i."""
    rows = -(-len({trace.name for trace in traces}) // 7)
    figure = go.Figure(
        data=list(traces),
        layout={
            "template": go.layout.Template(),
            "height": PLOT_HEIGHT + LEGEND_ROW * rows,
            "margin": {"l": 8, "r": 16, "t": 30, "b": 8},  # room for plotly's buttons
            "hovermode": "closest",
            "showlegend": True,
            "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "title": {"text": legend}},
            "uirevision": "kept",
            "meta": dict(colours),
            **layout,
        },
    )
    return Chart(title=title, figure=figure.to_plotly_json(), table=_table(figure))


def _table(figure: go.Figure) -> Rows:
    """Returns a row for every x of a figure, a column for every series."""
    names = [html.unescape(trace.name) for trace in figure.data]
    points = [dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data]
    xs = sorted({x for trace in points for x in trace})
    rows = [[f"{x:.6g}", *(f"{trace[x]:.4g}" if x in trace else "" for trace in points)] for x in xs]
    return [figure.layout.xaxis.title.text, *names], rows


def kl_charts(units: Sequence[Mapping[str, Any]], curves: Curves, per: str) -> list[Chart]:
    """Returns KL against the share of removed directions, a chart a kind of unit, a line a unit, on the same axes.

    ``per``: what the KL is a mean over. Points of 0 and less, which rounding gives, have no place on the axis.
    """
    positive = [kl for points in curves.values() for _, kl in points if kl > 0]
    if not positive:
        return []
    last = max(unit["block"] for unit in units)
    colours = ordered_colours(last + 1)
    decades = [math.log10(min(positive)) - 0.2, math.log10(max(positive)) + 0.2]
    charts = []
    for kind, members in _by_kind(units).items():
        drawn = [unit for unit in members if curves.get(unit["name"])]
        traces = [_kl_trace(unit, curves[unit["name"]], per) for unit in drawn]
        layout = {
            "xaxis": {"title": {"text": "share of directions removed"}, "tickformat": ".0%", "range": (0, 1)},
            "yaxis": {
                "title": {"text": f"KL, nats per {per}"},
                "type": "log",
                "exponentformat": "power",
                "dtick": 1,
                "range": decades,
            },
        }
        own = {scheme: [shades[unit["block"]] for unit in drawn] for scheme, shades in colours.items()}
        if traces:
            charts.append(_chart(kind, traces, own, "block", layout))
    return charts


def _kl_trace(unit: Mapping[str, Any], points: Sequence[tuple[int, float]], per: str) -> go.Scatter:
    removed = "k = %{customdata[1]:,} of %{customdata[2]:,} removed"
    return go.Scatter(
        name=str(unit["block"]),
        x=[count / unit["dimension"] for count, _ in points],
        y=[kl for _, kl in points],
        customdata=[(shown(unit["name"]), count, unit["dimension"]) for count, _ in points],
        mode="lines+markers",
        marker={"size": 5},
        line={"width": 1.6},
        hovertemplate=f"<b>%{{customdata[0]}}</b><br>{removed}<br>KL %{{y:.4g}} nats per {per}<extra></extra>",
    )


def _by_kind(units: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the units by what they are called in every block, as the pictures of ``tasks.plots`` have them."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for unit in units:
        kinds.setdefault(unit["name"].rpartition(".")[2], []).append(unit)
    return kinds


def rank_charts(units: Sequence[Mapping[str, Any]], results: Sequence[Result]) -> dict[str, Chart]:
    """Returns the share of directions kept by block, by target, a line a kind of unit; equal allocations once."""
    charts: dict[str, Chart] = {}
    kinds = _by_kind(units)
    for result in results:
        title = f"{target_label(result)} removed" + (f", seed {result['seed']}" if "seed" in result else "")
        if title in charts:
            continue
        traces = []
        for index, (kind, members) in enumerate(kinds.items()):
            ranks = [unit["dimension"] - result["removed"].get(unit["name"], 0) for unit in members]
            sizes = [unit["dimension"] for unit in members]
            traces.append(
                go.Scatter(
                    name=shown(kind),
                    x=[unit["block"] for unit in members],
                    y=[rank / size for rank, size in zip(ranks, sizes, strict=True)],
                    customdata=[(shown(u["name"]), r, s) for u, r, s in zip(members, ranks, sizes, strict=True)],
                    mode="lines+markers",
                    marker={"size": 8, "symbol": SYMBOLS[index % len(SYMBOLS)]},
                    hovertemplate="<b>%{customdata[0]}</b><br>rank %{customdata[1]:,} of %{customdata[2]:,}: "
                    "%{y:.1%} kept<extra></extra>",
                )
            )
        layout = {
            "xaxis": {"title": {"text": "block"}, "dtick": -(-len({unit["block"] for unit in units}) // MOST_TICKS)},
            "yaxis": {"title": {"text": "share of directions kept"}, "tickformat": ".0%", "range": (0, 1.05)},
        }
        charts[title] = _chart(title, traces, series_colours(len(traces)), "", layout)
    return charts


def cost_charts(content: Mapping[str, Any]) -> list[Chart]:
    """Returns quality against what a model costs, a chart a cost, a line a way of compressing and seed."""
    quality = metric_of(content["dense"])
    titles = {name: title for name, title in COST_TITLES.items() if name in COSTS}
    if "efficiency" not in content["dense"]:
        titles = {PARAMETERS: titles[PARAMETERS]}
    if has_speeds(content["results"]):
        titles[SPEED] = speed_title(content["results"])
    charts = []
    for name, title in titles.items():
        traces, labels = [_dense_trace(content, name, title, quality.title)], []
        for seed in content.get("seeds", [None]):
            own = [result for result in content["results"] if seed is None or result["seed"] == seed]
            for line in quality_against({**content, "results": own}, name):
                traces.append(_cost_trace(line, seed, title, quality.title, first=line.label not in labels))
                labels.append(line.label)
        colours = {
            scheme: [INK[scheme][0], *(shades[LINES.index(label)] for label in labels)]
            for scheme, shades in series_colours(len(LINES)).items()
        }
        axis = {"title": {"text": title}, "separatethousands": True}
        layout = {"xaxis": axis, "yaxis": {"title": {"text": quality.title}, "tickformat": _ticks(quality.name)}}
        charts.append(
            _chart(f"{quality.title.capitalize()} against {title.split(', context')[0]}", traces, colours, "", layout)
        )
    return charts


def _ticks(metric: str) -> str:
    return {"accuracy": ".0%"}.get(metric, "")


def _dense_trace(content: Mapping[str, Any], name: str, title: str, quality: str) -> go.Scatter:
    line = quality_against(content, name)[0]
    return go.Scatter(
        name="dense",
        x=[line.x[0]],
        y=[line.y[0]],
        mode="markers",
        marker={"size": 14, "symbol": "star"},
        hovertemplate=f"<b>dense</b><br>{quality} %{{y:.4g}}<br>{title}: %{{x:,.4~g}}<extra></extra>",
    )


def _cost_trace(line: Any, seed: int | None, title: str, quality: str, *, first: bool) -> go.Scatter:
    of_seed = "" if seed is None else f", seed {seed}"
    return go.Scatter(
        name=line.label if first else f"{line.label}{of_seed}",
        legendgroup=line.label,
        showlegend=first,
        x=list(line.x),
        y=list(line.y),
        customdata=[f"{note} removed" if note != "dense" else note for note in line.notes],
        text=["", *line.notes[1:]] if first and line.label == LINES[0] else None,
        mode="lines+markers+text",
        textposition="top center",
        textfont={"size": 10},
        cliponaxis=False,
        marker={"size": 7, "symbol": SYMBOLS[LINES.index(line.label)]},
        hovertemplate=f"<b>{line.label}{of_seed}, %{{customdata}}</b><br>{quality} %{{y:.4g}}<br>{title}: %{{x:,.4~g}}"
        "<extra></extra>",
    )


def history_charts(content: Mapping[str, Any]) -> list[Chart]:
    """Returns the validation metric by epoch, a chart a target, a line a seed; epoch 0 is NoLSP, a star the best."""
    charts = []
    for group in by_target(content["results"]):
        if "history" not in group[0]:
            continue
        name = validated_on(content, group[0])
        traces = [_history_trace(result, name) for result in group]
        epochs = max(len(result["history"]) for result in group)
        ticks: dict[str, Any] = {"tickformat": "d"}
        if epochs <= FEW_EPOCHS:
            ticks = {"tickvals": list(range(epochs)), "ticktext": ["NoLSP", *map(str, range(1, epochs))]}
        layout = {
            "xaxis": {"title": {"text": "epoch"}, "range": (-0.2, epochs - 0.8), **ticks},
            "yaxis": {"title": {"text": f"validation {name}"}, "tickformat": _ticks(name)},
            "showlegend": len(traces) > 1,
        }
        title = f"{target_label(group[0])} removed, {group[0]['objective']}"
        charts.append(_chart(title, traces, series_colours(len(traces)), "", layout))
    return charts


def validated_on(content: Mapping[str, Any], result: Result) -> str:
    """Returns the metric that a training was validated by."""
    if "validated_on" in result:
        return str(result["validated_on"])
    if "perplexity" in content["dense"]:
        return "perplexity"
    return "accuracy" if "validation_loss" in result["history"][0] else "KL, nats"


def _history_trace(result: Result, name: str) -> go.Scatter:
    epochs, best = result["history"], result["best_epoch"]
    losses = ["" if "train_loss" not in one else f"<br>training loss {one['train_loss']:.4g}" for one in epochs]
    return go.Scatter(
        name=f"seed {result['seed']}" if "seed" in result else f"validation {name}",
        x=[one["epoch"] for one in epochs],
        y=[one["validation"] for one in epochs],
        customdata=[
            f"{loss}<br>best" if one["epoch"] == best else loss for one, loss in zip(epochs, losses, strict=True)
        ],
        mode="lines+markers",
        marker={
            "size": [13 if one["epoch"] == best else 7 for one in epochs],
            "symbol": ["star" if one["epoch"] == best else "circle" for one in epochs],
            "opacity": 1,
        },
        hovertemplate=f"<b>epoch %{{x}}</b><br>validation {name} %{{y:.4g}}%{{customdata}}<extra></extra>",
    )
