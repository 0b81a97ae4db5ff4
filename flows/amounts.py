"""How much a target removes: a ratio as given, one that makes a size fit, or one that a divergence allows."""

import torch
from transformers import PreTrainedModel

from flows.config import CompressConfig
from lsp_core.allocation import find_limits
from lsp_core.fit import ratio_to_fit
from lsp_core.units import Unit
from tasks.allocate import check_reachable, expected_allocator


def resolve_ratios(
    config: CompressConfig, units: list[Unit], points: int, skeleton: PreTrainedModel, dtype: torch.dtype
) -> dict[str, float]:
    """Returns the ratio of every target of ``config``, by its amount, but of those that are bound by a divergence.

    ``dtype``: that of the checkpoint. Errors: ``ValueError`` for what no allocation under the caps reaches.
    """
    limits = find_limits(units, config.allocation.min_rank, config.allocation.keep_dense)
    allocator = expected_allocator(units, config.allocation.method, points, limits)
    if allocator.largest <= 0:
        raise ValueError("allocation.min_rank and allocation.keep_dense leave nothing to remove: lift some of them")
    ratios = {target.amount: target.ratio for target in config.targets if target.ratio is not None}
    check_reachable(allocator, list(ratios.values()))
    for target in config.targets:
        if target.fit_gib is not None:
            ratios[target.amount] = ratio_to_fit(
                skeleton, units, target.fit_gib, dtype=dtype, largest=allocator.largest
            )
    return ratios
