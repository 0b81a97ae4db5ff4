"""The trainable side of one unit: V, and the basis that a step makes of it, once.

What a step differentiates is this basis: U in the activation form, [U_perp, the directions that some member's mask
keeps] in the factor form. Its gradient, summed over micro-batches and processes, goes through the complement and the
QR once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lsp_core.orthogonal import complement, orthonormalize


class Form(Enum):
    """How the members of a unit compute: dense, or projected in one of the two exact forms."""

    DENSE = "dense"
    ACTIVATION = "activation"
    FACTOR = "factor"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a unit is projected in one step: a function of seed and step, so that every process knows it.

    ``masks``: one (K,) a member, nonzero where a direction is removed; None removes everything. ``alpha``: 1 in the
    factor form.
    """

    form: Form
    masks: Sequence[Tensor] | None = None
    alpha: float = 1.0

    @property
    def kept(self) -> Tensor | None:
        """Which directions each member keeps, (members, K)."""
        return None if self.masks is None else torch.stack([mask == 0 for mask in self.masks])

    def width(self, dimension: int, removed: int) -> int:
        """Returns the columns of the basis of a unit with D = ``dimension``, K = ``removed``."""
        if self.form is Form.ACTIVATION:
            return removed
        kept = self.kept
        return dimension - removed + (0 if kept is None else int(kept.any(0).sum()))


class Vectors:
    """V (D, K) of one unit, started at the last K columns of the ordered basis ``q`` (D, D)."""

    def __init__(self, q: Tensor, removed: int, compute: torch.dtype, device: torch.device) -> None:
        retained = q.shape[1] - removed
        self.start = q[:, :retained].to(device)
        self.v = nn.Parameter(q[:, retained:].to(device, torch.promote_types(compute, torch.float32), copy=True))
        self._edge: GradientEdge | None = None  # where the gradient of the last basis enters: it holds no copy of it

    def basis(self, plan: Plan) -> Tensor:  # -> (D, width), float64
        """Returns the basis of a step, differentiable by ``backward`` alone.

        Errors: as ``orthonormalize``.
        """
        u = orthonormalize(self.v)
        basis = u
        if plan.form is Form.FACTOR:
            basis, kept = complement(u, self.start), plan.kept
            if kept is not None:
                basis = torch.cat([basis, u[:, kept.any(0)]], 1)
        self._edge = get_gradient_edge(basis) if basis.requires_grad else None
        return basis.detach()

    def backward(self, gradient: Tensor) -> None:  # (D, width)
        """Adds to ``v.grad`` what ``gradient``, that of the basis, makes of it."""
        assert self._edge is not None, "backward follows a basis with a gradient"
        torch.autograd.backward([self._edge], [gradient.double()])
        self._edge = None

    def penalty(self) -> Tensor:
        """Returns L_ort of this unit: the mean |<v_i, v_j>| over the pairs i != j; 0 for a single column."""
        k = self.v.shape[1]
        gram = self.v.T @ self.v
        return (gram.abs().sum() - gram.diagonal().abs().sum()) / max(1, k * (k - 1))
