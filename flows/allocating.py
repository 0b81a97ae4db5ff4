"""The part of the graph that chooses ranks: a target's allocation, and the uniform one that it is held against."""

from typing import Any

from flows.config import Target
from flows.prepared import Prepared, Runner
from flows.sets import Sets
from storage.manifest import ArtifactRef
from tasks.allocate import allocate, allocate_like
from tasks.fisher import fisher
from tasks.measure import measure
from tasks.within import allocate_within

GRIDS = {"measured_kl": measure, "fisher": fisher}


def measure_grid(stages: Runner, prepared: Prepared, sets: Sets, ordered: ArtifactRef) -> ArtifactRef | None:
    """Returns the costs of truncations that ranks are allocated by, or None where the method needs none."""
    stage = GRIDS.get(prepared.config.allocation.method)
    if stage is None:
        return None
    return stages.run(stage, model=prepared.model, bases=ordered, tokens=sets.allocation, points=prepared.points)


def allocate_target(
    stages: Runner, prepared: Prepared, sets: Sets, ordered: ArtifactRef, grid: ArtifactRef | None, target: Target
) -> ArtifactRef:
    """Returns the ranks of one target."""
    chosen = prepared.config.allocation
    common: dict[str, Any] = {"bases": ordered, "grid": grid, "method": chosen.method, **chosen.caps}
    if target.max_kl is None:
        return stages.run(allocate, target.amount, **common, **_ratio(prepared, target))
    return stages.run(
        allocate_within,
        target.amount,
        **common,
        model=prepared.model,
        tokens=sets.allocation,
        max_kl=target.max_kl,
    )


def allocate_uniform(
    stages: Runner, prepared: Prepared, ordered: ArtifactRef, allocation: ArtifactRef, target: Target
) -> ArtifactRef:
    """Returns the uniform ranks that ``allocation``, the target's own, is compared with: as much removed, same caps."""
    label = f"{target.amount} uniform"
    common: dict[str, Any] = {"bases": ordered, "method": "uniform_parameters", **prepared.config.allocation.caps}
    if target.max_kl is None:
        return stages.run(allocate, label, grid=None, **common, **_ratio(prepared, target))
    return stages.run(allocate_like, label, allocation=allocation, **common)


def _ratio(prepared: Prepared, target: Target) -> dict[str, Any]:
    ratio = {"ratio": prepared.ratios[target.amount]}
    return ratio if target.fit_gib is None else {**ratio, "at_least": True}
