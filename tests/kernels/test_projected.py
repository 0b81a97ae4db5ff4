"""x - ((x U) o s) UT and its gradients: the kernels, and the op's other implementations, against float64."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from lsp_core import ops, plain
from lsp_kernels import projected
from tests.kernels.draws import DEVICE, DTYPES, cut_out, integers, normal, roundoff

# (T, D, K, members): smaller than a tile, primes, several tiles each way, more bands of tiles than one
SHAPES = [(1, 1, 1, 1), (37, 45, 13, 3), (131, 67, 259, 2), (150, 300, 16, 4)]
IMPLEMENTATIONS = {
    "kernel": (ops.project_kernel, ops.project_backward_kernel),
    "op": (ops._project._init_fn, ops._project_backward._init_fn),  # as they run on CPU
}
BOTH = pytest.mark.parametrize("functions", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())


def oracle(x, u, scales, grads):
    """The results and the gradients of x and U, by float64 autograd on the written-out formula."""
    x, u = x.double().requires_grad_(), u.double().requires_grad_()
    results = [x - ((x @ u) * scale.double()) @ u.T for scale in scales]
    return [result.detach() for result in results], torch.autograd.grad(results, [x, u], [g.double() for g in grads])


def scales_of(members, removed, dtype, value):
    """A mask for each member, times alpha."""
    return value * (integers(members, removed, dtype=dtype, seed=5) != 0).to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width", "removed", "members"), SHAPES, ids=str)
def test_exact_on_whole_numbers(tokens, width, removed, members, dtype, functions):
    """A sparse U keeps every number on the way a whole one of at most 256, which every dtype holds."""
    x = integers(tokens, width, dtype=dtype, seed=1)
    u = integers(width, removed, dtype=dtype, seed=2) * (integers(width, removed, dtype=dtype, seed=3) != 0)
    u = u * (integers(width, removed, dtype=dtype, seed=4) != 0)
    scales = scales_of(members, removed, dtype, 1)
    grads = [integers(tokens, width, dtype=dtype, seed=6 + member) for member in range(members)]
    expected, expected_grads = oracle(x, u, scales, grads)
    assert max(part.abs().max() for part in [*expected, *expected_grads]) <= 256

    forward, backward = functions
    *results, narrow = forward(x, u, scales)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert torch.equal(result.double(), wanted)
    for result, wanted in zip(backward(grads, x, u, scales, narrow), expected_grads, strict=True):
        assert result.dtype == dtype
        assert torch.equal(result.double(), wanted)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_of_rounding(dtype, functions):
    """Each number that is stored on the way (x U, g, the products that dU adds up) is rounded once to ``dtype``."""
    tokens, width, removed, members = 61, 45, 29, 3
    x, u = normal(tokens, width, dtype=dtype, seed=1), normal(width, removed, dtype=dtype, seed=2) / width**0.5
    scales = scales_of(members, removed, dtype, 0.625)
    grads = [normal(tokens, width, dtype=dtype, seed=3 + member) for member in range(members)]
    expected, expected_grads = oracle(x, u, scales, grads)
    size, size_grads = oracle(x.abs(), u.abs(), scales, [grad.abs() for grad in grads])
    size = [2 * x.abs().double() - one for one in size]  # |x| + ((|x| |U|) o s) |UT|
    unit = roundoff(dtype) * (2 + members) + (tokens + width + removed) * members * roundoff(torch.float32)
    forward, backward = functions
    *results, narrow = forward(x, u, scales)
    for result, wanted, one in zip(results, expected, size, strict=True):
        assert ((result - wanted).abs() <= unit * one).all()
    whole = sum(grad.abs().double() for grad in grads)
    size_grads = 2 * whole - size_grads[0], size_grads[1].abs()
    for result, wanted, one in zip(backward(grads, x, u, scales, narrow), expected_grads, size_grads, strict=True):
        assert ((result - wanted).abs() <= unit * one).all()


def test_rows_of_more_dimensions_that_lie_apart():
    x = cut_out(integers(3, 5, 37, dtype=torch.float32, seed=1))
    u = integers(7, 37, dtype=torch.float32, seed=2).T
    scales = torch.ones(1, 7, device=DEVICE)
    result, narrow = ops.project_kernel(x, u, scales)
    assert result.shape == x.shape
    assert torch.equal(result, x - (x @ u) @ u.T)
    assert narrow.shape == (1, 15, 16)  # padded
    assert torch.equal(narrow[0, :, :7], (x @ u).reshape(15, 7))
    assert (narrow[0, :, 7:] == 0).all()
    x_grad, _ = ops.project_backward_kernel([x], x, u, scales, narrow)
    assert torch.equal(x_grad, result)  # the map is symmetric


def test_tiles_cover_the_result_once():
    """Bands of several rows of tiles and a last one that is not full."""
    x = integers(128 * (projected.GROUP + 2) + 1, 3, dtype=torch.bfloat16, seed=1)
    u = integers(3, 130, dtype=torch.bfloat16, seed=2)
    (narrow,) = projected.scaled_products(x, u, torch.ones(1, 130, device=DEVICE))
    assert torch.equal(narrow, x @ u)


def test_plain_is_the_formula_of_the_projector():
    """Bit for bit, gradients included, however the members' outputs are used."""
    x, u = normal(31, 24, dtype=torch.float32, seed=1), normal(24, 7, dtype=torch.float32, seed=2)
    scales = list(scales_of(3, 7, torch.float32, 0.3))
    weights = [normal(11, 24, dtype=torch.float32, seed=3 + member) for member in range(3)]

    def gradients(function):
        leaves = x.clone().requires_grad_(), u.clone().requires_grad_()
        q, k, v = (F.linear(part, weight) for part, weight in zip(function(*leaves), weights, strict=True))
        loss = (q * k).sum(1).softmax(0) @ v
        return [loss, *torch.autograd.grad(loss.square().sum(), leaves)]

    def written_out(x, u):
        narrow = x @ u
        for scale in scales:
            yield x - F.linear(narrow * scale, u)

    for mine, wanted in zip(gradients(lambda x, u: plain.project(x, u, scales)), gradients(written_out), strict=True):
        assert torch.equal(mine, wanted)


def test_autograd_of_the_op():
    """Of float64, on CPU, where the op is plain torch; with an output that nothing depends on."""
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    u = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    scales = torch.rand(2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, u: tuple(torch.ops.lsp.project(x, u, scales)[:-1]), (x, u))
    assert torch.autograd.gradcheck(lambda x, u: torch.ops.lsp.project(x, u, scales)[1], (x, u))
