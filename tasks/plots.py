"""The report's pictures: KL curves of the units, and how much of each unit an allocation keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsp_core.allocation import UnitCurve
from lsp_core.units import Unit

COLUMNS = 3
PANEL = (4.2, 3.2)  # inches


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


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
