"""One ordered orthonormal basis a unit, from which every rank is read: the first r columns span what is kept.

Input side (paper, equation 2 and proposition 1): with G = S ST and the right singular vectors of Wbar S in decreasing
order, the kept space at rank r is span(S Vw_r) for every r at once, so Q = qf(S Vw) orders them all. Output side: the
eigenvectors of the summed output Gram, which are the left singular vectors of [W_1 S_1 ... W_m S_m]. A random basis, on
either side, is the ablation that knows neither weights nor data.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lsp_core.gram import NonFiniteError
from lsp_core.orthogonal import orthonormalize
from lsp_core.units import Unit

Init = Literal["whitened", "plain", "random"]


class IndefiniteGramError(ValueError):
    """A Gram matrix that no admissible ridge makes positive definite; the message names the unit."""


@dataclass(frozen=True, kw_only=True)
class OrderedBasis:
    """``q`` (D, D) orthogonal, in the Gram's dtype; its last k columns go at count k. ``ridge``: added to the Gram."""

    q: Tensor
    ridge: float


def ordered_basis(
    unit: Unit, gram: Tensor, weights: Sequence[Tensor], *, init: Init = "whitened", seed: int = 0
) -> OrderedBasis:
    """Returns the ordered basis of one unit.

    ``gram`` (D, D) as ``gather_grams`` gives it; ``weights`` the members' (D_out, D_in). ``init="plain"`` orders an
    input-side unit by the Gram alone, blind to the weights; ``"random"`` is blind to both, a function of ``seed`` and
    the unit's name.
    Errors: ``NonFiniteError``, ``IndefiniteGramError``.
    """
    if not torch.isfinite(gram).all():
        raise NonFiniteError(f"the Gram matrix of unit {unit.name} holds a NaN or an infinity")
    if init == "random":
        return OrderedBasis(q=random_basis(unit.dimension, unit.name, seed).to(gram), ridge=0.0)
    gram = (gram + gram.T) / 2
    if unit.side == "output" or init == "plain":
        return OrderedBasis(q=_descending_eigenvectors(gram), ridge=0.0)
    factor, ridge = cholesky_with_ridge(gram, unit.name)
    inner = torch.zeros_like(gram)  # WbarT Wbar
    for weight in weights:
        weight = weight.to(gram)
        inner.addmm_(weight.T, weight)
    right = _descending_eigenvectors(factor.T @ inner @ factor)
    return OrderedBasis(q=torch.linalg.qr(factor @ right).Q, ridge=ridge)


def random_basis(dimension: int, name: str, seed: int) -> Tensor:  # -> (D, D)
    """Returns an orthogonal matrix, uniform over all of them, float64; made on the CPU whatever the device."""
    drawn = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator().manual_seed(drawn)
    return orthonormalize(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64))


def cholesky_with_ridge(gram: Tensor, name: str) -> tuple[Tensor, float]:  # (D, D) -> (D, D)
    """Returns the lower Cholesky factor of ``gram`` + ridge I, and the ridge, in the Gram's units; 0 if none is needed.

    The first ridge is the paper's -lambda_min + 1e-6, or what the precision holds relative to the mean diagonal if that
    is more; then ten times as much, up to 1e-2 of the mean diagonal.
    Errors: ``IndefiniteGramError``.
    """
    factor, info = torch.linalg.cholesky_ex(gram)
    if info == 0:
        return factor, 0.0
    mean_diagonal = gram.diagonal().mean().item()
    smallest = torch.linalg.eigvalsh(gram)[0].item()
    limit = 1e-2 * mean_diagonal
    ridge = min(limit, max(-smallest + 1e-6, len(gram) * torch.finfo(gram.dtype).eps * mean_diagonal))
    while 0 < ridge <= limit:
        shift = ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor, info = torch.linalg.cholesky_ex(gram + shift)
        if info == 0:
            return factor, ridge
        ridge = 10 * ridge if ridge == limit else min(10 * ridge, limit)
    raise IndefiniteGramError(
        f"the Gram matrix of unit {name} stays indefinite up to a ridge of {limit:.3g} (smallest eigenvalue "
        f"{smallest:.3g}): use more calibration tokens than the layer is wide, or precision float64"
    )


def _descending_eigenvectors(matrix: Tensor) -> Tensor:  # (D, D) -> (D, D)
    ascending: Tensor = torch.linalg.eigh(matrix).eigenvectors
    return ascending.flip(-1)
