"""The proposition of the paper (section 'Whitened Initialization', identities (i)-(iii)) on the bases that we compute.

X stands for n calibration inputs, E(Z) = |(W - Z) X^T|^2, with the unnormalized Gram as the code keeps it. Tolerance
1e-10 relative: eigenvectors of a Gram of condition 1e3 in float64 leave errors of second order in 1e3 * 1e-16.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from lsp_core.basis import IndefiniteGramError, cholesky_with_ridge, ordered_basis, random_basis
from lsp_core.gram import NonFiniteError

TOLERANCE = 1e-10


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(tokens: int, width: int, seed: int) -> Tensor:
    """Correlated calibration inputs (T, D): no Gram here is close to the identity."""
    return random(tokens, width, seed=seed) @ random(width, width, seed=seed + 1) / width**0.5


def close(a: Tensor, b: Tensor, scale: Tensor) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE * scale)


@pytest.mark.parametrize("others", [(7,), (23,), (5, 5, 5), (19, 3)])
@pytest.mark.parametrize("dimension", [1, 2, 13])
def test_identity_ii_and_iii_on_the_input_side(make_unit, dimension, others):
    """The error of every rank is the optimum plus the excess, for single layers and for ties of unequal widths."""
    x = inputs(64, dimension, seed=dimension)
    weights = [random(d, dimension, seed=10 + i) for i, d in enumerate(others)]
    gram = x.T @ x
    basis = ordered_basis(make_unit("input", dimension, others), gram, weights)
    assert basis.ridge == 0
    s = torch.linalg.cholesky(gram)
    stacked = torch.cat(weights)
    left, sigma, right = torch.linalg.svd(stacked @ s)
    sigma = torch.cat([sigma, sigma.new_zeros(dimension - len(sigma))])  # a flat stack has fewer singular values
    total = (stacked @ x.T).square().sum()
    rank = min(left.shape[1], dimension)
    for r in range(1, dimension):
        kept = basis.q[:, :r]
        projector = kept @ kept.T
        error = sum(((w - w @ projector) @ x.T).square().sum() for w in weights)
        optimum = sigma[r:].square().sum()
        c_r, c_rest = s @ right.T[:, :r], s @ right.T[:, r:]
        excess = (sigma[:r, None] * (torch.linalg.pinv(c_r) @ c_rest)).square().sum()
        if r <= rank:  # beyond, the whitened directions are an arbitrary basis of a null space
            assert close(error, optimum + excess, total)
            assert close(projector, c_r @ torch.linalg.pinv(c_r), torch.ones(()))
        if r == 1 < rank:
            assert excess > 1e-6 * total  # the test would not see a missing excess otherwise


@pytest.mark.parametrize("dimension", [2, 13])
def test_whitened_shared_subspace_is_optimal_in_whitened_coordinates(make_unit, dimension):
    """(iii): no other subspace, kept obliquely, has a smaller summed error than the whitened one."""
    x = inputs(64, dimension, seed=3)
    weights = [random(d, dimension, seed=20 + d) for d in (9, 4)]
    s = torch.linalg.cholesky(x.T @ x)
    basis = ordered_basis(make_unit("input", dimension, (9, 4)), x.T @ x, weights)
    for r in range(1, dimension):
        whitened = torch.linalg.qr(torch.linalg.solve_triangular(s, basis.q[:, :r], upper=False)).Q
        best = sum((w @ s @ (torch.eye(dimension) - whitened @ whitened.T)).square().sum() for w in weights)
        for seed in range(5):
            near = torch.linalg.qr(whitened + 0.1 * random(dimension, r, seed=seed)).Q
            other = sum((w @ s @ (torch.eye(dimension) - near @ near.T)).square().sum() for w in weights)
            assert best <= other * (1 + TOLERANCE)


def test_the_excess_vanishes_for_an_isotropic_gram(make_unit):
    weight = random(9, 13, seed=4)
    basis = ordered_basis(make_unit("input", 13, (9,)), 3.0 * torch.eye(13, dtype=torch.float64), [weight])
    sigma = torch.linalg.svdvals(weight)
    for r in range(1, 9):
        kept = basis.q[:, :r]
        error = 3.0 * (weight - weight @ kept @ kept.T).square().sum()
        assert close(error, 3.0 * sigma[r:].square().sum(), sigma.square().sum())


@pytest.mark.parametrize("others", [(7,), (23,), (5, 8)])
@pytest.mark.parametrize("dimension", [1, 2, 13])
def test_identity_i_and_iii_on_the_output_side(make_unit, dimension, others):
    """The error of every rank is the optimum of the column-stacked whitened weight."""
    xs = [inputs(64, d, seed=30 + d) for d in others]
    weights = [random(dimension, d, seed=40 + i) for i, d in enumerate(others)]
    gram = sum((x @ w.T).T @ (x @ w.T) for x, w in zip(xs, weights, strict=True))
    basis = ordered_basis(make_unit("output", dimension, others), gram, weights)
    whitened = torch.cat([w @ torch.linalg.cholesky(x.T @ x) for x, w in zip(xs, weights, strict=True)], 1)
    sigma = torch.linalg.svdvals(whitened)
    total = sigma.square().sum()
    for k in range(dimension):
        u = basis.q[:, dimension - k :]
        error = sum((u @ (u.T @ (w @ x.T))).square().sum() for x, w in zip(xs, weights, strict=True))
        assert close(error, sigma[dimension - k :].square().sum(), total)


@pytest.mark.parametrize(("side", "init"), [("input", "whitened"), ("input", "plain"), ("output", "whitened")])
def test_one_basis_is_nested_for_every_rank(make_unit, make_gram, side, init):
    """The first r columns of q span what a solve at rank r of its own keeps."""
    d, others = 17, (11, 6)
    gram = make_gram(d, seed=5)
    weights = [random(*((o, d) if side == "input" else (d, o)), seed=o) for o in others]
    q = ordered_basis(make_unit(side, d, others), gram, weights, init=init).q
    assert q.dtype == torch.float64
    assert close(q.T @ q, torch.eye(d, dtype=torch.float64), torch.ones(()))
    s = torch.linalg.cholesky(gram)
    for r in range(1, d):
        if side == "input" and init == "whitened":
            alone = s @ torch.linalg.svd(torch.cat(weights) @ s).Vh[:r].T
        else:
            alone = torch.linalg.svd(s).U[:, :r]
        alone = torch.linalg.qr(alone).Q
        assert (q[:, :r] @ q[:, :r].T - alone @ alone.T).abs().max() <= 1e-8  # eigenvalue gaps down to 1e-3 of 1e-3


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("dimension", [1, 2, 33])
def test_a_random_basis_is_orthogonal_and_a_function_of_seed_and_name(make_unit, make_gram, side, dimension):
    unit = make_unit(side, dimension, (7,))
    shape = (7, dimension) if side == "input" else (dimension, 7)

    def drawn(seed, name=unit.name, gram_seed=0):
        gram = make_gram(dimension, seed=gram_seed)
        named = dataclasses.replace(unit, name=name)
        basis = ordered_basis(named, gram, [random(*shape, seed=gram_seed)], init="random", seed=seed)
        assert basis.ridge == 0
        return basis.q

    q = drawn(0)
    assert close(q.T @ q, torch.eye(dimension, dtype=torch.float64), torch.ones(()))
    assert torch.equal(q, drawn(0, gram_seed=1))
    if dimension > 1:
        assert not torch.allclose(q, drawn(1))
        assert not torch.allclose(q, drawn(0, name="another.unit"))
        state = torch.get_rng_state()
        drawn(2)
        assert torch.equal(state, torch.get_rng_state())


def test_random_bases_have_no_preferred_direction():
    """Entries of a uniform orthogonal matrix have mean 0 and variance 1/D: 4 standard errors over 400 draws."""
    draws = torch.stack([random_basis(5, f"unit {i}", 0) for i in range(400)])
    assert draws.mean(0).abs().max() <= 4 * (1 / 5 / 400) ** 0.5
    # the variance of q^2 is 2 (D - 1) / (D^2 (D + 2))
    assert (draws.square().mean(0) - 1 / 5).abs().max() <= 4 * (2 * 4 / (25 * 7) / 400) ** 0.5


def test_a_random_basis_takes_the_grams_dtype_and_refuses_a_nan(make_unit, make_gram):
    unit, gram = make_unit("input", 11, (7,)), make_gram(11)
    assert ordered_basis(unit, gram.float(), [random(7, 11, seed=0)], init="random").q.dtype == torch.float32
    gram[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        ordered_basis(unit, gram, [random(7, 11, seed=0)], init="random")


def test_plain_ignores_the_weights_and_whitened_does_not(make_unit, make_gram):
    unit, gram = make_unit("input", 11, (7,)), make_gram(11)
    first, second = random(7, 11, seed=0), random(7, 11, seed=1)
    plain = [ordered_basis(unit, gram, [w], init="plain").q for w in (first, second)]
    whitened = [ordered_basis(unit, gram, [w]).q for w in (first, second)]
    assert torch.equal(plain[0], plain[1])
    descending = (plain[0].T @ gram @ plain[0]).diagonal()
    assert (descending.diff() <= 0).all()
    assert (whitened[0] - whitened[1]).abs().max() > 1e-3


@pytest.mark.parametrize("rank", [1, 8])
def test_singular_gram_takes_the_smallest_ridge_and_records_it(make_unit, make_gram, rank):
    d = 13
    gram = 500.0 * make_gram(d, rank, seed=rank) - 1e-9 * torch.eye(d, dtype=torch.float64)
    basis = ordered_basis(make_unit("input", d, (7,)), gram, [random(7, d, seed=0)])
    smallest = torch.linalg.eigvalsh(gram)[0].item()
    assert basis.ridge == pytest.approx(-smallest + 1e-6, rel=1e-6)
    assert close(basis.q.T @ basis.q, torch.eye(d, dtype=torch.float64), torch.ones(()))


def test_identity_ii_holds_for_the_regularized_objective(make_unit, make_gram):
    """With a ridge eta, error and excess are those of E + eta |W - Z|^2 (paper, 'Numerical stabilization')."""
    d, r = 13, 5
    gram = 500.0 * make_gram(d, 8) - 1e-4 * torch.eye(d, dtype=torch.float64)
    weight = random(7, d, seed=0)
    basis = ordered_basis(make_unit("input", d, (7,)), gram, [weight])
    assert basis.ridge > 1e-4
    regularized = gram + basis.ridge * torch.eye(d, dtype=torch.float64)
    s = torch.linalg.cholesky(regularized)
    _, sigma, right = torch.linalg.svd(weight @ s)
    kept = basis.q[:, :r]
    rest = weight - weight @ kept @ kept.T
    c_r, c_rest = s @ right.T[:, :r], s @ right.T[:, r:]
    excess = (sigma[:r, None] * (torch.linalg.pinv(c_r) @ c_rest)).square().sum()
    expected = sigma[r:].square().sum() + excess
    # the Gram's condition is 5e8: eigenvectors are good to about 5e8 * 1e-16, which the error sees in second order
    assert (torch.trace(rest @ regularized @ rest.T) - expected).abs() <= 1e-8 * sigma.square().sum()


def test_ridge_is_never_below_what_the_precision_holds(make_gram):
    d = 13
    gram = (1e6 * make_gram(d, 4)).float()
    gram -= 0.05 * torch.eye(d)
    factor, ridge = cholesky_with_ridge(gram, "a.unit")
    mean = gram.diagonal().mean().item()
    assert d * torch.finfo(torch.float32).eps * mean <= ridge <= 1e-2 * mean
    shifted = gram + ridge * torch.eye(d)
    assert (factor @ factor.T - shifted).abs().max() <= d * torch.finfo(torch.float32).eps * shifted.abs().max()


def test_indefinite_gram_names_the_unit(make_unit, make_gram):
    gram = make_gram(13) - 0.5 * torch.eye(13, dtype=torch.float64)
    with pytest.raises(IndefiniteGramError, match=r"a\.unit.*smallest eigenvalue -0\.4"):
        ordered_basis(make_unit("input", 13, (7,)), gram, [random(7, 13, seed=0)])


@pytest.mark.parametrize("side", ["input", "output"])
def test_gram_with_a_nan_names_the_unit(make_unit, make_gram, side):
    gram = make_gram(13)
    gram[3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match=r"a\.unit"):
        ordered_basis(make_unit(side, 13, (7,)), gram, [random(7, 13, seed=0)])
