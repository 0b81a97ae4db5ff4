"""curve: what every ratio would cost before any training, up to the largest that can be reached."""

from collections.abc import Sequence
from typing import Any

from lsp_core.fit import GIB, checkpoint_bytes
from storage.manifest import ArtifactRef
from tasks.allocate import allocation_record, read_allocator
from tasks.artifacts import read_bases, write_json
from tasks.caching import Work, stage
from tasks.measure import open_sensitivity
from tasks.models import ModelSource, load_model, placed
from tasks.plots import plot_tradeoff

CURVE, PICTURE = "curve.json", "plots/curve.png"
BOUND = 0.1  # nats per token, that the summary says the reach of


@stage()
def curve(
    work: Work,
    *,
    model: ModelSource,
    bases: ArtifactRef,
    grid: ArtifactRef | None,
    tokens: ArtifactRef,
    points: int,
    method: str,
    min_rank: dict[str, int] | None = None,
    keep_dense: list[str] | None = None,
) -> None:
    """Publishes predicted and joint KL and the size at ``points`` ratios, the last the largest; and their picture."""
    allocator = read_allocator(work, bases, grid, method, min_rank, keep_dense)
    units, tensors = read_bases(work, bases)
    loaded = load_model(model, work.runtime.device, offload=work.runtime.offload)
    parameters = sum(parameter.numel() for parameter in loaded.parameters())
    rows: list[dict[str, Any]] = []
    with placed(loaded, work.runtime) as home, work.progress() as progress:
        sensitivity = open_sensitivity(work, loaded, units, tensors, tokens, home)
        for point in range(1, points + 1):
            chosen = allocator.allocate(allocator.largest * (point / points))
            size = checkpoint_bytes(loaded, units, chosen.removed, dtype=loaded.dtype)
            rows.append(
                {
                    "realized_ratio": chosen.ratio,
                    "parameters": parameters - chosen.saved,
                    "gib": size / GIB,
                    "kl_sum_of_isolated": allocation_record(chosen, method)["kl_sum_of_isolated"],
                    "kl_joint": sensitivity.joint(chosen.removed),
                }
            )
            progress(point, points)
    content = {
        "method": method,
        "largest_ratio": allocator.largest,
        "parameters": parameters,
        "gib": checkpoint_bytes(loaded, units, {}, dtype=loaded.dtype) / GIB,
        "points": rows,
    }
    write_json(work.output / CURVE, content)
    plot_tradeoff(content, reach(rows, BOUND), BOUND, work.output / PICTURE)


def reach(rows: Sequence[dict[str, Any]], bound: float) -> float:
    """Returns the ratio at which the joint KL first exceeds ``bound``, between two points by a straight line.

    The last ratio where it never does. The dense model, ratio 0 and KL 0, is the point before the first.
    """
    ratio, kl = 0.0, 0.0
    for row in rows:
        if row["kl_joint"] > bound:
            return ratio + (row["realized_ratio"] - ratio) * (bound - kl) / (row["kl_joint"] - kl)
        ratio, kl = row["realized_ratio"], row["kl_joint"]
    return ratio
