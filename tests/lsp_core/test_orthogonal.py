"""qf and the complement against LAPACK, autograd and finite differences."""

import pytest
import torch
from torch import Tensor

from lsp_core import orthogonal
from lsp_core.orthogonal import complement, orthonormalize

SHAPES = [(2, 1), (7, 1), (7, 3), (7, 6), (7, 7), (64, 37)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_condition(d: int, k: int, condition: float) -> Tensor:
    """A matrix (D, K) whose last columns are nearly combinations of the others."""
    left, right = torch.linalg.qr(random(d, k)).Q, torch.linalg.qr(random(k, k, seed=1)).Q
    return left @ torch.diag(torch.logspace(0, -torch.tensor(condition).log10().item(), k, dtype=torch.float64)) @ right


def identity(k: int) -> Tensor:
    return torch.eye(k, dtype=torch.float64)


@pytest.mark.parametrize(("d", "k"), SHAPES)
def test_is_lapack_with_the_signs_fixed(oracles, d, k):
    v = random(d, k)
    u = orthonormalize(v)
    assert (u - oracles.positive_qf(v)).abs().max() <= 1e-12  # condition of these: below 1e2
    assert (u.T @ u - identity(k)).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_works_in_float64_whatever_comes_in(oracles, dtype):
    v = random(31, 13).to(dtype).requires_grad_()
    u = orthonormalize(v)
    assert u.dtype == torch.float64
    assert (u - oracles.positive_qf(v.detach().double())).abs().max() <= 1e-12
    u.sum().backward()
    assert v.grad.dtype == dtype


@pytest.mark.parametrize(("d", "k"), SHAPES[:5])
def test_gradient_against_finite_differences(d, k):
    v = (torch.linalg.qr(random(d, k)).Q + 0.1 * random(d, k, seed=3)).requires_grad_()
    assert torch.autograd.gradcheck(orthonormalize, (v,))


@pytest.mark.parametrize(("d", "k"), SHAPES)
def test_gradient_against_autograd_through_lapack(oracles, d, k):
    """At a perturbed V, with a probe that sees every entry of U."""
    start = torch.linalg.qr(random(d, k)).Q + 0.1 * random(d, k, seed=3)
    probe = random(d, k, seed=4)
    grads = []
    for function in (orthonormalize, oracles.positive_qf):
        v = start.clone().requires_grad_()
        (function(v) * probe).sum().backward()
        grads.append(v.grad)
    # rounding of two solves with R; at K = D the gradient of U is that of a rotation alone
    assert (grads[0] - grads[1]).abs().max() <= 1e-11 * grads[1].abs().max().clamp_min(1)


@pytest.mark.parametrize(("condition", "fallback"), [(1e2, False), (1e5, False), (1e9, True), (1e12, True)])
def test_ill_conditioned_vectors_take_householder(oracles, monkeypatch, condition, fallback):
    v = with_condition(23, 9, condition)
    calls = []
    householder = orthogonal._householder_qr
    monkeypatch.setattr(orthogonal, "_householder_qr", lambda v: calls.append(1) or householder(v))
    u = orthonormalize(v)
    assert bool(calls) == fallback
    assert (u.T @ u - identity(9)).abs().max() <= 1e-12
    # each column of U moves by about the condition times the roundoff
    assert (u - oracles.positive_qf(v)).abs().max() <= 100 * condition * torch.finfo(torch.float64).eps


def test_gradient_of_the_fallback(oracles):
    """Both routes share one backward: at a condition of 1e7 the gradients agree to 1e7 roundoffs, relative."""
    grads = []
    for function in (orthonormalize, oracles.positive_qf):
        v = with_condition(23, 9, 1e7).requires_grad_()
        (function(v) * random(23, 9, seed=4)).sum().backward()
        grads.append(v.grad)
    assert (grads[0] - grads[1]).norm() <= 1e-6 * grads[1].norm()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_dependent_columns_are_an_error(seed, scale):
    v = scale * random(31, 5, seed=seed)
    v[:, 4] = v[:, :4] @ random(4, seed=seed + 100)
    with pytest.raises(ValueError, match=r"\(31, 5\) has dependent or non-finite columns"):
        orthonormalize(v)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_bad_columns_are_an_error(bad):
    v = random(31, 5)
    v[:, 2] = bad
    with pytest.raises(ValueError, match="dependent or non-finite columns"):
        orthonormalize(v)


@pytest.mark.parametrize(("d", "k"), [(2, 1), (7, 1), (7, 3), (7, 6), (64, 37)])
def test_complement_is_orthonormal(d, k):
    q = torch.linalg.qr(random(d, d)).Q
    u = orthonormalize(q[:, d - k :] + 0.2 * random(d, k, seed=1) / d**0.5)
    rest = complement(u, q[:, : d - k])
    both = torch.cat([rest, u], 1)
    assert rest.shape == (d, d - k)
    assert (both.T @ both - identity(d)).abs().max() <= 1e-11  # projecting out leaves roundoff over |rest|


@pytest.mark.parametrize("nearness", [0.0, 1e-13, 1e-7, 1e-4])
def test_complement_when_the_start_lies_inside_the_removed_space(nearness):
    """The start tells nothing about the complement then; any basis of it will do."""
    d, k = 11, 6
    q = torch.linalg.qr(random(d, d)).Q
    u, outside = q[:, :k], q[:, k:]
    start = u[:, : d - k] + nearness * outside
    both = torch.cat([complement(u, start), u], 1)
    # of a start outside by s, 1e-16 / s of roundoff along U is left, for the s > 1e-6 that are not started afresh
    assert (both.T @ both - identity(d)).abs().max() <= 1e-11


def of_span(u: Tensor, start: Tensor, weight: Tensor) -> Tensor:
    """A smooth function of span(U) alone, through the factors B = W E and A = ET of its complement."""
    basis = complement(u, start)
    return (weight @ basis @ basis.T).tanh().sum()


@pytest.mark.parametrize(("d", "k"), [(5, 1), (5, 4), (9, 4)])
def test_complement_gradient_against_finite_differences(d, k):
    q = torch.linalg.qr(random(d, d)).Q
    start, weight = q[:, : d - k], random(3, d, seed=2)
    v = (q[:, d - k :] + 0.1 * random(d, k, seed=1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: of_span(orthonormalize(v), start, weight), (v,))


@pytest.mark.parametrize("inside", [False, True])
def test_complement_gradient_against_the_dense_projector(inside):
    """Also where the basis is started afresh because ``start`` lies in span(U)."""
    d, k = 9, 5
    weight, v0 = random(3, d, seed=2), random(d, k)
    start = v0[:, : d - k].clone() if inside else random(d, d - k, seed=5)
    grads = []
    for dense in (False, True):
        v = v0.clone().requires_grad_()
        u = orthonormalize(v)
        value = (weight @ (identity(d) - u @ u.T)).tanh().sum() if dense else of_span(u, start, weight)
        value.backward()
        grads.append(v.grad)
    assert (grads[0] - grads[1]).abs().max() <= 1e-11 * grads[1].abs().max()
