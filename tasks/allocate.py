"""allocate: units, KL grid, ratio -> how many directions each unit loses."""

import math
from collections.abc import Sequence

from lsp_core.allocation import Allocation, UnitCurve, greedy, uniform_parameters, uniform_rank
from lsp_core.sensitivity import removal_counts
from lsp_core.units import Unit
from storage.grid import MEASURED, KLGrid
from storage.manifest import ArtifactRef
from tasks.artifacts import read_json, read_units, write_json
from tasks.caching import Work, stage

ALLOCATION = "allocation.json"
UNIFORM = {"uniform_parameters": uniform_parameters, "uniform_rank": uniform_rank}


@stage()
def allocate(work: Work, *, bases: ArtifactRef, grid: ArtifactRef | None, ratio: float, method: str) -> None:
    """Publishes the removed counts; ``grid`` is needed by ``measured_kl`` alone."""
    units = read_units(work.folder(bases))
    if method == "measured_kl":
        assert grid is not None
        allocation = greedy(read_curves(work, grid, units), ratio)
    else:
        allocation = UNIFORM[method](units, ratio)
    write_json(work.output / ALLOCATION, _record(allocation, method))


def _record(allocation: Allocation, method: str) -> dict[str, object]:
    cost = allocation.cost if math.isfinite(allocation.cost) else None
    return {
        "method": method,
        "realized_ratio": allocation.ratio,
        "saved": allocation.saved,
        "total": allocation.total,
        "kl_sum_of_isolated": cost,
        "removed": dict(allocation.removed),
    }


def read_removed(work: Work, allocation: ArtifactRef) -> dict[str, int]:
    """Returns the removed count of every unit that loses any."""
    removed = read_json(work.folder(allocation) / ALLOCATION)["removed"]
    return {name: count for name, count in removed.items() if count > 0}


def read_curves(work: Work, grid: ArtifactRef, units: Sequence[Unit]) -> list[UnitCurve]:
    """Returns the measured points of every unit."""
    with KLGrid.open(str(work.folder(grid))).read() as data:
        kl, status, removed = data["kl"].values, data["status"].values, data["removed"].values
    curves = []
    for row, unit in enumerate(units):
        points = [point for point in range(kl.shape[1]) if status[row, point] == MEASURED]
        counts = tuple(int(removed[row, point]) for point in points)
        curves.append(UnitCurve(unit=unit, counts=counts, kl=tuple(float(kl[row, point]) for point in points)))
    return curves


def check_reachable(units: Sequence[Unit], ratios: Sequence[float], method: str, points: int) -> None:
    """Errors: ``UnreachableRatio`` if ``method`` reaches one of the ratios in no way; needs no measurement."""
    for ratio in ratios:
        if method != "measured_kl":
            UNIFORM[method](units, ratio)
            continue
        counts = {unit: removal_counts(unit, points) for unit in units}
        greedy([UnitCurve(unit=unit, counts=counts[unit], kl=tuple(map(float, counts[unit]))) for unit in units], ratio)
