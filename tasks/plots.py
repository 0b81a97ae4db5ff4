"""The report's pictures: KL curves of the units, and how much of each unit an allocation keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lsp_core.allocation import UnitCurve
from lsp_core.units import Unit

COLUMNS = 3
PANEL = (4.2, 3.2)  # inches
WIDE = 3  # figures that differ by more than this factor are drawn on a logarithmic axis


def kind_of(unit: Unit) -> str:
    """Returns what a unit is called in every block, such as ``q_proj+k_proj+v_proj``."""
    return unit.name.rpartition(".")[2]


def plot_curves(curves: Sequence[UnitCurve], path: Path) -> None:
    """Draws KL against the share of removed directions, a panel a kind of unit, a line a block."""
    kinds = list(dict.fromkeys(kind_of(curve.unit) for curve in curves))
    figure, panels = _panels(len(kinds))
    colours = mpl.colormaps["viridis"]
    last = max(1, max(curve.unit.block for curve in curves))
    for kind, axes in zip(kinds, panels, strict=True):
        for curve in (curve for curve in curves if kind_of(curve.unit) == kind):
            x = [count / curve.unit.dimension for count in curve.counts]
            axes.plot(
                x, curve.kl, marker=".", color=colours(curve.unit.block / last), label=f"block {curve.unit.block}"
            )
        axes.set(title=kind, xlabel="share of directions removed", ylabel="KL, nats per token", yscale="log")
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    if len(handles) <= 12:
        figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=6)
    _save(figure, path)


def plot_ranks(units: Sequence[Unit], removed: Mapping[str, Mapping[str, int]], path: Path) -> None:
    """Draws the share of retained directions against the block, a panel an allocation, a line a kind of unit."""
    kinds = list(dict.fromkeys(kind_of(unit) for unit in units))
    figure, panels = _panels(len(removed))
    for (title, counts), axes in zip(removed.items(), panels, strict=True):
        for kind in kinds:
            members = [unit for unit in units if kind_of(unit) == kind]
            kept = [1 - counts.get(unit.name, 0) / unit.dimension for unit in members]
            axes.plot([unit.block for unit in members], kept, marker="o", label=kind)
        axes.set(title=title, xlabel="block", ylabel="share of directions kept", ylim=(0, 1.05))
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=len(kinds))
    _save(figure, path)


def plot_tradeoff(content: Mapping[str, Any], reach: float, bound: float, path: Path) -> None:
    """Draws predicted and joint KL of a ``curve`` against the ratio, with the size on top.

    The ratio ``reach``, up to which the joint KL stays below ``bound``, is marked.
    """
    rows, dense = content["points"], content["gib"]
    figure = Figure(figsize=(1.6 * PANEL[0], 1.3 * PANEL[1]), layout="constrained")
    axes = figure.add_subplot()
    ratios = [row["realized_ratio"] for row in rows]
    axes.plot(ratios, [row["kl_joint"] for row in rows], marker="o", label="joint: all cuts at once")
    if all(row["kl_sum_of_isolated"] is not None for row in rows):
        isolated = [row["kl_sum_of_isolated"] for row in rows]
        axes.plot(
            ratios, isolated, marker=".", linestyle="--", label=f"predicted: sum of isolated, {content['method']}"
        )
    axes.axhline(bound, color="grey", linewidth=0.8, linestyle=":")
    axes.axvline(reach, color="grey", linewidth=0.8, linestyle=":", label=f"{bound:g} nats at a ratio of {reach:.2f}")
    axes.set(
        xlabel="share of the targeted parameters removed", ylabel="KL, nats per token", yscale="log", xlim=(0, None)
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    slope = (dense - rows[-1]["gib"]) / ratios[-1]  # GiB of the whole ratio: sizes are linear in it
    top = axes.secondary_xaxis(
        "top", functions=(lambda ratio: dense - slope * ratio, lambda gib: (dense - gib) / slope)
    )
    top.set_xlabel("size of the checkpoint, GiB")
    _save(figure, path)


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One cell of an ablation: its figure before and after training, and the deviation of the latter over the seeds."""

    label: str
    untrained: float
    trained: float
    deviation: float


def plot_cells(panels: Mapping[str, Sequence[Dot]], dense: float, title: str, path: Path) -> None:
    """Draws NoLSP and LSP of every cell, a panel a ratio, a line a cell, with the ``dense`` figure marked."""
    longest = max(len(dots) for dots in panels.values())
    width, height = PANEL[0] * (0.6 + 0.8 * len(panels)), 1.6 + 0.28 * longest
    figure = Figure(figsize=(width, height), layout="constrained")
    for index, (name, dots) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        places, trained = range(len(dots)), [dot.trained for dot in dots]
        untrained, bars = [dot.untrained for dot in dots], [dot.deviation for dot in dots]
        axes.scatter(untrained, places, s=70, facecolors="none", edgecolors="tab:grey", label="NoLSP")
        axes.errorbar(trained, places, xerr=bars if any(bars) else None, fmt="o", color="tab:blue", label="LSP")
        axes.axvline(dense, color="grey", linewidth=0.8, linestyle=":", label="dense")
        shown = [dense, *trained, *untrained]
        wide = min(shown) > 0 and max(shown) > WIDE * min(shown)
        axes.set(title=name, xlabel=title, xscale="log" if wide else "linear", ylim=(len(dots) - 0.5, -0.5))
        if wide:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(places, [dot.label for dot in dots] if index == 0 else [], fontsize=8)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    _save(figure, path)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Models by two figures, the first of them dense; ``notes``: what is written beside each."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    notes: Sequence[str]


def plot_pareto(panels: Mapping[str, Sequence[Line]], quality: str, path: Path) -> None:
    """Draws ``quality`` against the figure that each panel is called by, a line a way of compressing."""
    figure, axes_of = _panels(len(panels))
    for (name, lines), axes in zip(panels.items(), axes_of, strict=True):
        for line in lines:
            axes.plot(line.x, line.y, marker="o", markersize=4, label=line.label)
            for x, y, note in list(zip(line.x, line.y, line.notes, strict=True))[1:]:
                axes.annotate(note, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
        axes.scatter(lines[0].x[:1], lines[0].y[:1], marker="*", s=120, color="black", zorder=3, label="dense")
        axes.set_xlabel(name, fontsize=8)
        axes.set_ylabel(quality)
        axes.grid(alpha=0.3)
    figure.legend(*axes_of[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    _save(figure, path)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
