"""The size of a merged checkpoint, and the ratio that makes it fit, from shapes alone.

A checkpoint holds all parameters, shared ones once, and the persistent buffers; numbers that are not integers in the
dtype that the model is stored in. The header of the file, some kilobytes, is not counted.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lsp_core.units import Unit

GIB = 2**30


def checkpoint_bytes(model: nn.Module, units: Sequence[Unit], removed: Mapping[str, int], *, dtype: torch.dtype) -> int:
    """Returns the bytes of ``model``, which may be on the meta device, with ``removed`` directions merged away."""
    persistent = set(model.state_dict())
    tensors = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in persistent)]
    dense = sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors)
    return dense - sum(unit.saved(removed.get(unit.name, 0)) for unit in units) * dtype.itemsize


def ratio_to_fit(model: nn.Module, units: Sequence[Unit], gib: float, *, dtype: torch.dtype, largest: float) -> float:
    """Returns the smallest ratio whose checkpoint takes ``gib`` GiB at most; ``largest``: the largest to be reached.

    An allocation that saves at least this ratio fits, the last of its bytes included.
    Errors: ``ValueError`` if the dense model fits already, or if no allocation does.
    """
    dense = checkpoint_bytes(model, units, {}, dtype=dtype)
    room = int(gib * GIB)
    if dense <= room:
        raise ValueError(
            f"the dense model takes {dense / GIB:.4g} GiB and fits into {gib:g} GiB: nothing is to be done, drop the "
            "target or ask for less"
        )
    total = sum(unit.parameters for unit in units)
    needed = -((room - dense) // dtype.itemsize)  # parameters, rounded up
    if needed > round(largest * total):
        smallest = (dense - round(largest * total) * dtype.itemsize) / GIB
        raise ValueError(
            f"fit_gib {gib:g} cannot be reached: the smallest model takes {_rounded_up(smallest)} GiB; lift the caps, "
            "or compress more of its layers"
        )
    return min(needed / total, largest)


def _rounded_up(gib: float) -> str:
    """Returns ``gib`` with four digits, no less than it is."""
    shown = f"{gib:.4g}"
    while float(shown) < gib:
        shown = f"{float(shown) * (1 + 1e-3):.4g}"
    return shown
