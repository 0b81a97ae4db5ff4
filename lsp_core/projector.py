"""Projectors on a frozen model: the trainable V of each unit and the two exact forms of the projected layer.

P = I - alpha U diag(m) UT with U = qf(V) (paper, sections 'Projector parameterization' and 'Practical design choices').
U is computed once per optimizer step. What the micro-batches differentiate are leaves that depend on it; ``backward``
then carries the leaves' accumulated gradients through the QR, once.

- *Activation form*, any alpha: W (x - alpha (x U o m) UT), the leaf is U.
- *Factor form*, alpha = 1: with E = [U_perp, the directions that some member's mask keeps], P_m = E N_m ET where N_m is
  diagonal with 0 and 1, so the layer is two narrow products, (W_m E N_m)(ET x), and the leaves are these factors. It
  is the merged layer, and costs what the compressed model costs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsp_core.modeling_lsp import Once, StandIn, replace_module
from lsp_core.ops import project
from lsp_core.orthogonal import complement, orthonormalize
from lsp_core.units import Unit, bias_of, weight_of


class Form(Enum):
    """How the members of a unit compute: dense, or projected in one of the two exact forms."""

    DENSE = "dense"
    ACTIVATION = "activation"
    FACTOR = "factor"


class Projector:
    """The projector of one unit.

    ``v`` (D, K) is the trainable parameter, started at the last K columns of the ordered basis ``q`` (D, D).
    """

    def __init__(self, unit: Unit, removed: int, q: Tensor, layers: Sequence[nn.Module]) -> None:
        if not 0 < removed < unit.dimension:
            raise ValueError(f"unit {unit.name} cannot remove {removed} of {unit.dimension} directions")
        self.unit = unit
        self.weights = [weight_of(layer).detach() for layer in layers]
        self.biases = [None if bias is None else bias.detach() for bias in map(bias_of, layers)]
        compute = self.weights[0].dtype
        retained = unit.dimension - removed
        self.start = q[:, :retained].to(self.weights[0].device)
        precision = torch.promote_types(compute, torch.float32)
        self.v = nn.Parameter(q[:, retained:].to(self.weights[0].device, precision, copy=True))
        self._scales: list[Tensor] = []
        self.set_dense()

    def set_dense(self) -> None:
        """Members compute their pretrained output (the teacher)."""
        self._set(Form.DENSE, [])

    def set_activation_form(self, alpha: float, masks: Sequence[Tensor]) -> None:
        """Modulated projection with one mask (K,) of 0 and 1 a member."""
        u = orthonormalize(self.v).to(self.weights[0].dtype)
        self._scales = [alpha * mask.to(u) for mask in masks]
        self._set(Form.ACTIVATION, [u])

    def set_factor_form(self, masks: Sequence[Tensor] | None = None) -> None:
        """Projection at alpha = 1, with one mask (K,) a member, or with everything removed."""
        u = orthonormalize(self.v)
        basis = complement(u, self.start)
        keep: list[Tensor] | None = None
        if masks is not None:
            kept = torch.stack([mask == 0 for mask in masks])  # (members, K)
            some = kept.any(0)
            basis = torch.cat([basis, u[:, some]], 1)
            keep = [torch.cat([row.new_ones(self.start.shape[1]), row]).to(self.weights[0]) for row in kept[:, some]]
        basis = basis.to(self.weights[0].dtype)
        if self.unit.side == "input":
            shared = basis.T
            own = [weight @ basis for weight in self.weights]
            own = own if keep is None else [factor * row for factor, row in zip(own, keep, strict=True)]
        else:
            shared = basis
            own = [basis.T @ weight for weight in self.weights]
            own = own if keep is None else [factor * row[:, None] for factor, row in zip(own, keep, strict=True)]
        self._set(Form.FACTOR, [shared, *own])

    def _set(self, form: Form, graph: list[Tensor]) -> None:
        self.form = form
        self._once = Once(len(self.weights))  # a latent of another U is forgotten
        self._graph = graph
        self._leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in graph]

    def backward(self) -> None:
        """Adds to ``v.grad`` what the micro-batches left on the leaves, through one backward of the QR."""
        pairs = [(t, leaf.grad) for t, leaf in zip(self._graph, self._leaves, strict=True) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
        self.set_dense()

    def penalty(self) -> Tensor:
        """Returns L_ort of this unit: the mean |<v_i, v_j>| over the pairs i != j; 0 for a single column."""
        k = self.v.shape[1]
        if k < 2:
            return self.v.new_zeros(())
        gram = self.v.T @ self.v
        return (gram.abs().sum() - gram.diagonal().abs().sum()) / (k * (k - 1))

    def apply(self, member: int, x: Tensor) -> Tensor:  # (..., D_in) -> (..., D_out)
        """Returns the output of member number ``member`` in the current form."""
        weight, bias = self.weights[member], self.biases[member]
        if self.form is Form.DENSE:
            return F.linear(x, weight, bias)
        if self.form is Form.FACTOR:
            shared, own = self._leaves[0], self._leaves[1 + member]
            if self.unit.side == "input":
                return F.linear(self._once(lambda source: F.linear(source, shared), x), own, bias)
            return F.linear(F.linear(x, own), shared, bias)
        (u,) = self._leaves
        if self.unit.side == "input":
            return F.linear(self._once(lambda source: project(source, u, self._scales), x)[member], weight, bias)
        (projected,) = project(F.linear(x, weight), u, [self._scales[member]])
        return projected if bias is None else projected + bias


class _ProjectedLinear(StandIn):
    """Stands in for one member while its projector is attached."""

    def __init__(self, projector: Projector, member: int) -> None:
        super().__init__()
        self.projector = projector
        self.member = member

    @property
    def weight(self) -> Tensor:
        return self.projector.weights[self.member]

    def forward(self, x: Tensor) -> Tensor:
        return self.projector.apply(self.member, x)


@contextmanager
def attached(
    model: nn.Module, units: Sequence[Unit], bases: Mapping[str, Tensor], removed: Mapping[str, int]
) -> Iterator[dict[str, Projector]]:
    """Puts projectors, dense at first, on every unit with ``removed`` > 0 inside the ``with`` block; yields them."""
    projectors: dict[str, Projector] = {}
    originals: dict[str, nn.Module] = {}
    try:
        for unit in units:
            if removed.get(unit.name, 0) == 0:
                continue
            layers = [model.get_submodule(name) for name in unit.members]
            projector = Projector(unit, removed[unit.name], bases[unit.name], layers)
            projectors[unit.name] = projector
            for member, (name, layer) in enumerate(zip(unit.members, layers, strict=True)):
                originals[name] = layer
                replace_module(model, name, _ProjectedLinear(projector, member))
        yield projectors
    finally:
        for name, layer in originals.items():
            replace_module(model, name, layer)
