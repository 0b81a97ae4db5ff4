"""The factored linear layer, and the latent that a tied group computes once."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Once:
    """Evaluates a function once for several readers of the same tensor, and forgets it after the last of them."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._source: Tensor | None = None
        self._result: Tensor | None = None
        self._reads = 0

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._source is not x or self._result is None:
            self._source, self._result, self._reads = x, function(x), 0
        result = self._result
        self._reads += 1
        if self._reads >= self.readers:
            self._source = self._result = None
        return result


class Factor(nn.Module):
    """x -> x WT without bias, evaluated once a forward pass for the ``readers`` layers that share it.

    ``weight`` is A (R, D_in) of an input-tied group, or of a single layer.
    """

    def __init__(self, weight: Tensor, *, readers: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._once = Once(readers)

    def forward(self, x: Tensor) -> Tensor:  # (..., D_in) -> (..., R)
        if self._once.readers == 1:
            return F.linear(x, self.weight)
        return self._once(lambda source: F.linear(source, self.weight), x)


class StandIn(nn.Module):
    """What takes the place of a linear layer. Some blocks ask a layer's ``weight`` for its dtype before the call."""

    @property
    def weight(self) -> Tensor:
        """A tensor of the layer's dtype and device."""
        raise NotImplementedError


class FactoredLinear(StandIn):
    """y = B A x + bias, or B C A x + bias where both sides are projected.

    ``shared`` holds A (R_in, D_in) as "input", B (D_out, R_out) as "output", or both; other layers may hold the same.
    ``own`` is the rest of the product: B (D_out, R_in), A (R_out, D_in) or the core C (R_out, R_in).
    """

    def __init__(self, own: Tensor, shared: Mapping[str, Factor], bias: Tensor | None) -> None:
        super().__init__()
        self.sides = frozenset(shared)
        self.input_factor = shared["input"] if "input" in shared else Factor(own)
        self.core = Factor(own) if len(shared) == 2 else None
        self.output_factor = shared["output"] if "output" in shared else Factor(own)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return self.output_factor.weight

    @property
    def ranks(self) -> dict[str, int]:
        """R of each side: one and the same without a core."""
        return {"input": self.input_factor.weight.shape[0], "output": self.output_factor.weight.shape[1]}

    @property
    def in_features(self) -> int:
        return self.input_factor.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.output_factor.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:  # (..., D_in) -> (..., D_out)
        latent = self.input_factor(x)
        if self.core is not None:
            latent = self.core(latent)
        return F.linear(latent, self.output_factor.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, ranks={self.ranks}, out_features={self.out_features}"


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts ``module`` where ``name`` is; other names of the same layer (weight sharing) are replaced with it."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):  # named_children passes over second names
            if child is old:
                setattr(parent, child_name, module)


def bias_of(module: nn.Module) -> Tensor | None:
    """Returns the bias of a linear layer, (D_out,), or None."""
    bias = module.bias
    assert bias is None or isinstance(bias, torch.Tensor)
    return bias
