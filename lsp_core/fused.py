"""The factored layers of a model computed by ``lsp::low_rank_linear``: a tied group's members in one call.

For decoding on a GPU, where a few tokens take two kernels a group in place of one product a factor. Parameters keep
their names and values. There each rank is rounded up in memory by zeros, to a multiple that the kernels load whole.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lsp_core.modeling_lsp import FactoredLinear, Once, Shared
from lsp_core.ops import low_rank_linear

RANK_MULTIPLE = 16  # elements


@torch.no_grad()
def fuse(model: nn.Module, *, latent_cache: bool = False) -> int:
    """Makes the layers of ``model`` compute so, in place, for inference; returns the number of groups.

    Layers with a core stay as they are, and so do those whose factors were replaced, by an adapter for one: fuse last.
    ``latent_cache``: also the groups that make keys and values, whose latents a ``LatentCache`` reads.
    """
    kept = _cached(model) if latent_cache else set()
    groups: dict[int, list[FactoredLinear]] = {}
    for layer in model.modules():
        if isinstance(layer, FactoredLinear) and _is_plain(layer) and id(layer.input_factor) not in kept:
            groups.setdefault(id(layer.input_factor), []).append(layer)
    for layers in groups.values():
        group = _Group(layers, RANK_MULTIPLE if layers[0].weight.is_cuda else 1)
        for index, layer in enumerate(layers):
            layer.fused = _Member(group, index)
    return len(groups)


def _cached(model: nn.Module) -> set[int]:
    """Returns the identities of the input factors of the layers that make keys and values."""
    inner = model.get_submodule("model")
    units: Any = model.config.units  # type: ignore[union-attr]
    roles = {name: role for unit in units for name, role in zip(unit["members"], unit["roles"], strict=True)}
    makers = [inner.get_submodule(name) for name, role in roles.items() if {"key", "value"} & set(role.split("+"))]
    return {id(layer.input_factor) for layer in makers if isinstance(layer, FactoredLinear)}


def _is_plain(layer: FactoredLinear) -> bool:
    factors = (layer.input_factor, layer.output_factor)
    return layer.core is None and all(
        type(factor.linear if isinstance(factor, Shared) else factor) is nn.Linear for factor in factors
    )


class _Group:
    """Layers that read one input factor; their ranks are rounded up to a multiple of ``multiple``."""

    def __init__(self, layers: list[FactoredLinear], multiple: int) -> None:
        shared, owned = layers[0].input_factor.weight, [layer.output_factor.weight for layer in layers]
        missing = -len(shared) % multiple
        self._a = _widened(shared, (0, 0, 0, missing))
        self._bs = [_widened(weight, (0, missing)) for weight in owned]
        self._biases = [layer.bias for layer in layers]
        self._once = Once(len(layers))

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self._once(self._products, x)

    def _products(self, x: Tensor) -> list[Tensor]:
        return low_rank_linear(x, self._a, self._bs, self._biases)


def _widened(parameter: Tensor, missing: tuple[int, ...]) -> Tensor:
    """Returns ``parameter`` with zeros behind its last rows or columns; it becomes a part of what is returned."""
    if not any(missing):
        return parameter
    whole = nn.functional.pad(parameter.data, missing)
    rows, columns = parameter.shape
    parameter.data = whole[:rows, :columns]
    return whole


class _Member:
    def __init__(self, group: _Group, index: int) -> None:
        self._group, self._index = group, index

    def __call__(self, x: Tensor) -> Tensor:
        return self._group(x)[self._index]
