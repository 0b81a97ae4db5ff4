"""Projectors on a frozen model: the two exact forms of the projected layer.

P = I - alpha U diag(m) UT with U = qf(V) (paper, sections 'Projector parameterization' and 'Practical design choices').
The basis of a step is made once (``lsp_core.vectors``), here or in another process. What the micro-batches
differentiate are leaves that depend on it; ``gradient`` then carries their gradients to the basis, once.

- *Activation form*, any alpha: W (x - alpha (x U o m) UT), the leaf is U.
- *Factor form*, alpha = 1: with E = [U_perp, the directions that some member's mask keeps], P_m = E N_m ET where N_m is
  diagonal with 0 and 1, so the layer is two narrow products, (W_m E N_m)(ET x), and the leaves are these factors. It
  is the merged layer, and costs what the compressed model costs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsp_core.modeling_lsp import Once, StandIn, replace_module
from lsp_core.ops import project
from lsp_core.units import Unit, bias_of, weight_of
from lsp_core.vectors import Form, Plan, Vectors


class Projector:
    """The projector of one unit on its ``layers``, whose weights are read where they are used.

    ``q`` (D, D), the ordered basis, makes this process the owner of V; None: another one is.
    """

    def __init__(self, unit: Unit, removed: int, q: Tensor | None, layers: Sequence[nn.Module]) -> None:
        if not 0 < removed < unit.dimension:
            raise ValueError(f"unit {unit.name} cannot remove {removed} of {unit.dimension} directions")
        self.unit = unit
        self.removed = removed
        self.layers = layers
        first = weight_of(layers[0])
        self.dtype, self.device = first.dtype, first.device
        self.vectors = None if q is None else Vectors(q, removed, self.dtype, self.device)
        self._scales: list[Tensor] = []
        self.set_dense()

    @property
    def v(self) -> nn.Parameter:
        """V (D, K), at its owner."""
        assert self.vectors is not None, "another process owns this unit"
        return self.vectors.v

    def weight(self, member: int) -> Tensor:  # -> (D_out, D_in)
        """Returns the weight of member number ``member``."""
        return weight_of(self.layers[member]).detach()

    def set_dense(self) -> None:
        """Members compute their pretrained output (the teacher)."""
        self._basis: Tensor | None = None
        self._set(Form.DENSE, [])

    def set_form(self, plan: Plan) -> None:
        """Members are projected as ``plan`` says, on the basis that this process makes of V."""
        assert self.vectors is not None, "another process owns this unit"
        self.install(plan, self.vectors.basis(plan).to(self.dtype))

    def empty_basis(self, plan: Plan) -> Tensor:
        """Returns memory for the basis of a step that another process makes, (D, width)."""
        width = plan.width(self.unit.dimension, self.removed)
        return torch.empty(self.unit.dimension, width, dtype=self.dtype, device=self.device)

    def install(self, plan: Plan, basis: Tensor) -> None:
        """Members are projected as ``plan`` says, on its ``basis`` (D, width)."""
        self._basis = basis.detach().requires_grad_(torch.is_grad_enabled())
        if plan.form is Form.ACTIVATION:
            masks = plan.masks or [basis.new_ones(self.removed)] * len(self.layers)
            self._scales = [plan.alpha * mask.to(basis) for mask in masks]
            self._set(Form.ACTIVATION, [self._basis])
        else:
            self._set(Form.FACTOR, self._factors(plan, self._basis))

    def _factors(self, plan: Plan, basis: Tensor) -> list[Tensor]:
        kept = plan.kept
        weights = [self.weight(member) for member in range(len(self.layers))]
        if self.unit.side == "input":
            shared, own = basis.T, [weight @ basis for weight in weights]
        else:
            shared, own = basis, [basis.T @ weight for weight in weights]
        if kept is not None:
            kept = kept[:, kept.any(0)]
            retained = kept.new_ones(len(own), self.unit.dimension - self.removed)
            rows = torch.cat([retained, kept], 1).to(basis)
            own = [f * (row if self.unit.side == "input" else row[:, None]) for f, row in zip(own, rows, strict=True)]
        return [shared, *own]

    def _set(self, form: Form, graph: list[Tensor]) -> None:
        self.form = form
        self._once = Once(len(self.layers))  # a latent of another U is forgotten
        self._graph = graph
        self._leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in graph]

    def gradient(self, *, zeros: bool = False) -> Tensor | None:  # -> (D, width)
        """Returns the gradient of the basis that the micro-batches left, and makes the members dense.

        Without one, None, or ``zeros``.
        """
        pairs = [(t, leaf.grad) for t, leaf in zip(self._graph, self._leaves, strict=True) if leaf.grad is not None]
        assert self._basis is not None, "a gradient follows a form"
        gradient = torch.zeros_like(self._basis) if zeros else None
        if pairs:
            (gradient,) = torch.autograd.grad([t for t, _ in pairs], [self._basis], [grad for _, grad in pairs])
        self.set_dense()
        return gradient

    def backward(self) -> None:
        """Adds to ``v.grad`` what the micro-batches left, through one backward of the QR."""
        gradient = self.gradient()
        if gradient is not None:
            assert self.vectors is not None, "another process owns this unit"
            self.vectors.backward(gradient)

    def apply(self, member: int, x: Tensor) -> Tensor:  # (..., D_in) -> (..., D_out)
        """Returns the output of member number ``member`` in the current form."""
        bias = bias_of(self.layers[member])
        bias = None if bias is None else bias.detach()
        if self.form is Form.DENSE:
            return F.linear(x, self.weight(member), bias)
        if self.form is Form.FACTOR:
            shared, own = self._leaves[0], self._leaves[1 + member]
            if self.unit.side == "input":
                return F.linear(self._once(lambda source: F.linear(source, shared), x), own, bias)
            return F.linear(F.linear(x, own), shared, bias)
        (u,) = self._leaves
        if self.unit.side == "input":
            projected = self._once(lambda source: project(source, u, self._scales), x)[member]
            return F.linear(projected, self.weight(member), bias)
        (projected,) = project(F.linear(x, self.weight(member)), u, [self._scales[member]])
        return projected if bias is None else projected + bias


class _ProjectedLinear(StandIn):
    """Stands in for one member while its projector is attached."""

    def __init__(self, projector: Projector, member: int) -> None:
        super().__init__()
        self.projector = projector
        self.member = member

    @property
    def weight(self) -> Tensor:
        return self.projector.weight(self.member)

    def forward(self, x: Tensor) -> Tensor:
        return self.projector.apply(self.member, x)


@contextmanager
def attached(
    model: nn.Module,
    units: Sequence[Unit],
    bases: Mapping[str, Tensor],
    removed: Mapping[str, int],
    owned: Collection[str] | None = None,
) -> Iterator[dict[str, Projector]]:
    """Puts projectors, dense at first, on every unit with ``removed`` > 0 inside the ``with`` block; yields them.

    ``owned``: the units whose V this process holds, by default all; of the others no basis is read.
    """
    projectors: dict[str, Projector] = {}
    originals: dict[str, nn.Module] = {}
    try:
        for unit in units:
            if removed.get(unit.name, 0) == 0:
                continue
            layers = [model.get_submodule(name) for name in unit.members]
            q = bases[unit.name] if owned is None or unit.name in owned else None
            projector = Projector(unit, removed[unit.name], q, layers)
            projectors[unit.name] = projector
            for member, (name, layer) in enumerate(zip(unit.members, layers, strict=True)):
                originals[name] = layer
                replace_module(model, name, _ProjectedLinear(projector, member))
        yield projectors
    finally:
        for name, layer in originals.items():
            replace_module(model, name, layer)


@contextmanager
def dense(projectors: Mapping[str, Projector]) -> Iterator[None]:
    """Switches ``projectors`` off inside the ``with`` block."""
    forms = {name: projector.form for name, projector in projectors.items()}
    for projector in projectors.values():
        projector.form = Form.DENSE
    try:
        yield
    finally:
        for name, projector in projectors.items():
            projector.form = forms[name]
