"""The factored layers of a model computed by ``lsp::low_rank_linear``: a tied group's members in one call.

For decoding on a GPU, where a few tokens take two kernels a group in place of one product a factor.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lsp_core.modeling_lsp import FactoredLinear, Once, Shared
from lsp_core.ops import low_rank_linear

RANK_MULTIPLE = 16  # elements: rows of B that the kernels load whole


@torch.no_grad()
def pad_ranks(model: nn.Module, multiple: int = RANK_MULTIPLE) -> int:
    """Rounds the ranks of ``model`` up to a multiple, in place, by zero rows of A and zero columns of B.

    The outputs stay. Returns the number of factors changed. For running, not for saving: a checkpoint's ranks are those
    of its config. Groups with a core, or with replaced factors, stay as they are.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, FactoredLinear)]
    held = {
        id(factor) for layer in layers if not _is_plain(layer) for factor in (layer.input_factor, layer.output_factor)
    }
    changed = 0
    for layer in layers:
        if id(layer.input_factor) not in held and id(layer.output_factor) not in held:
            changed += _pad(layer.input_factor, 0, multiple) + _pad(layer.output_factor, 1, multiple)
    return changed


def _pad(factor: nn.Module, dimension: int, multiple: int) -> bool:
    linear = factor.linear if isinstance(factor, Shared) else factor
    assert isinstance(linear, nn.Linear)
    missing = -linear.weight.shape[dimension] % multiple
    if missing:
        linear.weight = nn.Parameter(
            nn.functional.pad(linear.weight, (0, 0, 0, missing) if dimension == 0 else (0, missing)),
            requires_grad=False,
        )
        linear.out_features, linear.in_features = linear.weight.shape
    return missing > 0


def fuse(model: nn.Module, *, latent_cache: bool = False) -> int:
    """Makes the layers of ``model`` compute so, in place, for inference; returns the number of groups.

    Layers with a core stay as they are, and so do those whose factors were replaced, by an adapter for one: fuse last.
    ``latent_cache``: also the groups that make keys and values, whose latents a ``LatentCache`` reads.
    """
    kept = _cached(model) if latent_cache else set()
    groups: dict[int, list[FactoredLinear]] = {}
    for layer in model.modules():
        if isinstance(layer, FactoredLinear):
            layer.fused = None
            if _is_plain(layer) and id(layer.input_factor) not in kept:
                groups.setdefault(id(layer.input_factor), []).append(layer)
    for layers in groups.values():
        group = _Group(layers)
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
    """Layers that read one input factor."""

    def __init__(self, layers: list[FactoredLinear]) -> None:
        self._layers = layers
        self._once = Once(len(layers))

    def __call__(self, x: Tensor) -> list[Tensor]:
        return self._once(self._products, x)

    def _products(self, x: Tensor) -> list[Tensor]:
        layers = self._layers
        if not all(_is_plain(layer) for layer in layers):
            raise RuntimeError("a factor was replaced after the model was fused, by an adapter perhaps: fuse last")
        own = [layer.output_factor.weight for layer in layers]
        return low_rank_linear(x, layers[0].input_factor.weight, own, [layer.bias for layer in layers])


class _Member:
    def __init__(self, group: _Group, index: int) -> None:
        self._group, self._index = group, index

    def __call__(self, x: Tensor) -> Tensor:
        return self._group(x)[self._index]
