"""allocate: units, grid, ratio -> how many directions each unit loses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lsp_core.allocation import (
    Allocation,
    Limits,
    UnitCurve,
    UnreachableRatio,
    find_limits,
    greedy,
    largest_ratio,
    largest_uniform_ratio,
    uniform_parameters,
    uniform_rank,
)
from lsp_core.sensitivity import removal_counts
from lsp_core.units import Unit
from storage.grid import MEASURED, KLGrid
from storage.manifest import ArtifactRef
from tasks.artifacts import read_json, read_units, write_json
from tasks.caching import Work, stage

ALLOCATION = "allocation.json"
UNIFORM = {"uniform_parameters": uniform_parameters, "uniform_rank": uniform_rank}


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Spreads ratios over units by one method, within limits; ``curves`` is empty where the method needs no grid."""

    units: Sequence[Unit]
    method: str
    curves: Sequence[UnitCurve]
    limits: Limits

    def allocate(self, ratio: float, *, at_least: bool = False) -> Allocation:
        """Returns an allocation near ``ratio``, or one that reaches it. Errors: as ``greedy``."""
        if self.method in UNIFORM:
            return UNIFORM[self.method](self.units, ratio, limits=self.limits, at_least=at_least)
        return greedy(self.curves, ratio, limits=self.limits, at_least=at_least)

    @cached_property
    def largest(self) -> float:
        """The largest ratio that it reaches."""
        if self.method in UNIFORM:
            return largest_uniform_ratio(self.units, self.limits)
        return largest_ratio(self.curves, self.limits)


@stage()
def allocate(
    work: Work,
    *,
    bases: ArtifactRef,
    grid: ArtifactRef | None,
    ratio: float,
    method: str,
    min_rank: dict[str, int] | None = None,
    keep_dense: list[str] | None = None,
    at_least: bool = False,
) -> None:
    """Publishes the removed counts; the uniform methods need no ``grid``.

    ``min_rank``, ``keep_dense``: caps by patterns of names; ``at_least``: the ratio is reached, not only approached.
    """
    allocator = read_allocator(work, bases, grid, method, min_rank, keep_dense)
    write_json(work.output / ALLOCATION, allocation_record(allocator.allocate(ratio, at_least=at_least), method))


@stage(name="allocate")
def allocate_like(
    work: Work,
    *,
    bases: ArtifactRef,
    allocation: ArtifactRef,
    method: str,
    min_rank: dict[str, int] | None = None,
    keep_dense: list[str] | None = None,
) -> None:
    """Publishes what a uniform ``method`` removes at the realized ratio of ``allocation``."""
    allocator = read_allocator(work, bases, None, method, min_rank, keep_dense)
    ratio = read_json(work.folder(allocation) / ALLOCATION)["realized_ratio"]
    write_json(work.output / ALLOCATION, allocation_record(allocator.allocate(min(ratio, allocator.largest)), method))


def read_allocator(
    work: Work,
    bases: ArtifactRef,
    grid: ArtifactRef | None,
    method: str,
    min_rank: Mapping[str, int] | None,
    keep_dense: Sequence[str] | None,
) -> Allocator:
    """Returns what allocates by ``method`` and, where it needs one, ``grid``, under the caps."""
    units = read_units(work.folder(bases))
    curves: list[UnitCurve] = []
    if method not in UNIFORM:
        assert grid is not None
        curves = read_curves(work, grid, units)
    limits = find_limits(units, min_rank or {}, keep_dense or ())
    return Allocator(units=units, method=method, curves=curves, limits=limits)


def allocation_record(allocation: Allocation, method: str) -> dict[str, Any]:
    """Returns what an allocation's file says of it."""
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


def expected_allocator(units: Sequence[Unit], method: str, points: int, limits: Limits) -> Allocator:
    """Returns an allocator that reaches the ratios which ``method`` will, its costs being none; measures nothing."""
    counts = {unit: removal_counts(unit, points) for unit in units}
    curves = [UnitCurve(unit=unit, counts=counts[unit], kl=tuple(map(float, counts[unit]))) for unit in units]
    return Allocator(units=units, method=method, curves=curves, limits=limits)


def check_reachable(allocator: Allocator, ratios: Sequence[float]) -> None:
    """Errors: ``UnreachableRatio`` if ``allocator`` reaches one of the ratios in no way."""
    for ratio in ratios:
        try:
            allocator.allocate(ratio)
        except UnreachableRatio as error:
            capped = "; min_rank and keep_dense cap it, lift them or lower the ratio" if allocator.limits else ""
            raise UnreachableRatio(f"{error}{capped}") from None
