"""allocate_within: the largest ratio whose joint KL stays within a bound, found by bisection."""

import math

from lsp_core.allocation import Allocation
from lsp_core.gram import NonFiniteError
from lsp_core.sensitivity import Sensitivity
from storage.manifest import ArtifactRef
from tasks.allocate import ALLOCATION, allocation_record, read_allocator
from tasks.artifacts import read_bases, write_json
from tasks.caching import Work, stage
from tasks.measure import open_sensitivity
from tasks.models import ModelSource, load_model, placed

TOLERANCE = 0.005  # of the ratio
MEASUREMENTS = 9  # at most: the largest ratio, and eight halvings of the range


@stage(name="allocate")
def allocate_within(
    work: Work,
    *,
    model: ModelSource,
    bases: ArtifactRef,
    grid: ArtifactRef | None,
    tokens: ArtifactRef,
    max_kl: float,
    method: str,
    min_rank: dict[str, int] | None = None,
    keep_dense: list[str] | None = None,
) -> None:
    """Publishes the removed counts at the largest ratio whose joint KL is ``max_kl`` nats a token at most.

    To ``TOLERANCE``, the joint KL taken to grow with the ratio; every ratio tried is recorded.
    Errors: ``ValueError`` if even the lightest allocation exceeds ``max_kl``.
    """
    allocator = read_allocator(work, bases, grid, method, min_rank, keep_dense)
    units, tensors = read_bases(work, bases)
    loaded = load_model(model, work.runtime.device, offload=work.runtime.offload)
    joint: dict[tuple[int, ...], float] = {}  # by removed counts: near ratios may give the same
    tried: list[dict[str, float | None]] = []
    best: Allocation | None = None
    low, high = 0.0, allocator.largest
    ratio = high
    with placed(loaded, work.runtime) as home, work.progress() as progress:
        sensitivity = open_sensitivity(work, loaded, units, tensors, tokens, home)
        while len(tried) < MEASUREMENTS:
            chosen = allocator.allocate(ratio)
            counts = tuple(chosen.removed.values())
            if counts not in joint:
                joint[counts] = _joint(sensitivity, chosen)
            known = joint[counts] if math.isfinite(joint[counts]) else None
            tried.append({"ratio": ratio, "realized_ratio": chosen.ratio, "kl_joint": known})
            progress(len(tried), MEASUREMENTS)
            if joint[counts] <= max_kl:
                low, best = ratio, chosen if chosen.saved > 0 else best
            else:
                high = ratio
            if high - low <= TOLERANCE:
                break
            ratio = (low + high) / 2
        progress(MEASUREMENTS, MEASUREMENTS)
    if best is None:
        lightest = min((step for step in tried if step["realized_ratio"]), key=lambda step: step["ratio"] or 0.0)
        cost = math.inf if lightest["kl_joint"] is None else lightest["kl_joint"]
        raise ValueError(
            f"max_kl {max_kl:g} cannot be met: removing {lightest['realized_ratio']:.2%}, the lightest allocation, "
            f"costs {cost:.3g} nats per token already: raise max_kl, or keep its layers dense"
        )
    record = allocation_record(best, method)
    found = {"max_kl": max_kl, "kl_joint": joint[tuple(best.removed.values())], "tried": tried}
    write_json(work.output / ALLOCATION, record | found)


def _joint(sensitivity: Sensitivity, allocation: Allocation) -> float:
    """Returns the joint KL, infinite where the model breaks."""
    try:
        return sensitivity.joint(allocation.removed)
    except NonFiniteError:
        return math.inf
