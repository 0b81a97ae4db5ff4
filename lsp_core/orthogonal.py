"""Differentiable orthonormal bases: U = qf(V) of the removed subspace, and a basis of its complement.

Cholesky-QR in float64, repeated once where rounding asks for it, Householder QR where the columns are too dependent for
that; the diagonal of R is positive, so U is a function of V alone.
"""

from typing import Any

import torch
from torch import Tensor

ORTHOGONALITY_TOLERANCE = 1e-12  # largest |UT U - I| left by a first pass before a second is made
DEPENDENCE_LIMIT = 1e-6  # smallest ratio of R's diagonal entries that Cholesky-QR is trusted with


def orthonormalize(v: Tensor) -> Tensor:  # (D, K) -> (D, K), float64
    """Returns U = qf(V), the orthogonal factor of the thin QR with R's diagonal positive, float64; differentiable.

    Errors: ``ValueError`` if V is not finite or has dependent columns.
    Source: paper, section 'Projector parameterization'.
    """
    u: Tensor = _Orthonormalize.apply(v)  # type: ignore[no-untyped-call]
    return u


def complement(u: Tensor, start: Tensor) -> Tensor:  # (D, K), (D, R) -> (D, R), float64
    """Returns an orthonormal basis of span(U)'s complement, by projecting ``start`` out of U; U must be orthonormal.

    Its gradient is exact for any function of span(U) alone, which a rotation of the returned columns does not change;
    every use here (factors of a projected weight) is such a function.
    """
    basis: Tensor = _Complement.apply(u, start)  # type: ignore[no-untyped-call]
    return basis


class _Orthonormalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        v64 = v.double()
        factors = _cholesky_qr(v64) or _householder_qr(v64)
        ctx.save_for_backward(*factors)
        ctx.dtype = v.dtype
        return factors[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        u, r = ctx.saved_tensors
        inner = u.T @ grad
        rotation = torch.tril(inner - inner.T, -1)
        numerator = grad + u @ (rotation - inner)
        solved = torch.linalg.solve_triangular(r, numerator.T, upper=True).T
        return solved.to(ctx.dtype)  # type: ignore[no-any-return]


class _Complement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, start: Tensor) -> Tensor:
        u64, start64 = u.double(), start.double()
        rest = start64 - u64 @ (u64.T @ start64)
        factors = _cholesky_qr(rest)
        # what is left of a start inside span(U) is rounding, and as well conditioned as anything
        outside = factors is not None and factors[1].diagonal().min() > DEPENDENCE_LIMIT * start64.norm(dim=0).max()
        basis = factors[0] if factors and outside else torch.linalg.qr(u64, mode="complete").Q[:, u.shape[1] :]
        ctx.save_for_backward(u64, basis)
        ctx.dtype = u.dtype
        return basis

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        u, basis = ctx.saved_tensors
        return -(basis @ (grad.T @ u)).to(ctx.dtype), None


def _cholesky_qr(v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns Q and upper R with V = Q R, or None where V's columns are too dependent for it."""
    total: Tensor | None = None
    q = v
    for _ in range(2):
        gram = q.T @ q
        if total is not None and _distance_from_identity(gram) <= ORTHOGONALITY_TOLERANCE:
            return q, total
        lower, info = torch.linalg.cholesky_ex(gram)
        diagonal = lower.diagonal()
        if info != 0 or not (diagonal.numel() == 0 or diagonal.min() > DEPENDENCE_LIMIT * diagonal.max()):
            return None
        q = torch.linalg.solve_triangular(lower, q.T, upper=False).T
        total = lower.T if total is None else lower.T @ total
    return (q, total) if total is not None and _distance_from_identity(q.T @ q) <= ORTHOGONALITY_TOLERANCE else None


def _distance_from_identity(gram: Tensor) -> float:
    return (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max().item() if len(gram) else 0.0


def _householder_qr(v: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(v)
    diagonal = r.diagonal()
    rounding = max(v.shape) * torch.finfo(v.dtype).eps * diagonal.abs().max()
    if not (torch.isfinite(v).all() and diagonal.abs().min() > rounding):
        raise ValueError(f"V of shape {tuple(v.shape)} has dependent or non-finite columns: lower the learning rate")
    signs = torch.where(diagonal < 0, -1.0, 1.0).to(v)
    return q * signs, r * signs[:, None]
