"""Which process owns which unit: it holds V, Adam's moments and the start, and does their part of every step."""

from collections.abc import Mapping, Sequence

from lsp_core.flops import orthogonal_flops
from lsp_core.units import Unit


def orthogonal_costs(units: Sequence[Unit], removed: Mapping[str, int]) -> dict[str, float]:
    """Returns the operations of a step in the factor form, forward and backward, by unit with ``removed`` > 0."""
    active = [unit for unit in units if removed.get(unit.name, 0) > 0]
    return {unit.name: sum(orthogonal_flops([unit], removed, 1, 1, 0)) for unit in active}


def assign_owners(costs: Mapping[str, float], processes: int) -> dict[str, int]:
    """Returns the process of each unit, in the order of ``costs``: the costliest first, each to the least loaded.

    The most loaded process has at most 4/3 - 1/(3 processes) times the least possible; equal costs and loads go by
    name and by number, so that every process finds the same.
    Source: Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969).
    """
    loads = [0.0] * processes
    owners: dict[str, int] = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = min(range(processes), key=lambda process: (loads[process], process))
        loads[owners[name]] += costs[name]
    return {name: owners[name] for name in costs}
