"""The kernels of the low-rank linear layer against float64."""

import pytest
import torch

pytest.importorskip("triton")

from lsp_core import ops
from tests.kernels.draws import DEVICE, DTYPES, cut_out, integers, normal, roundoff

# (tokens, D_in, R, widths of the members): one row, primes, slices of D_in that end early, more rows than a block
SHAPES = [
    (1, 1, 1, [1]),
    (1, 37, 1, [5, 19]),
    (1, 2053, 19, [131, 1, 67]),
    (1, 37, 531, [19]),
    (2, 531, 17, [67, 5, 129, 31]),
    (7, 37, 131, [19]),
    (16, 256, 16, [64, 64]),
]


def oracle(x, a, bs, biases):
    latent = x.double() @ a.double().T
    return [latent @ b.double().T + (0 if bias is None else bias.double()) for b, bias in zip(bs, biases, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width", "rank", "members"), SHAPES, ids=str)
def test_exact_on_whole_numbers(tokens, width, rank, members, dtype):
    """Every dtype holds whole numbers up to 256, so neither order nor rounding can change anything."""
    x = integers(tokens, width, dtype=dtype, seed=1)
    a = integers(rank, width, dtype=dtype, seed=2)
    bs = [integers(out, rank, dtype=dtype, seed=3 + number) for number, out in enumerate(members)]
    biases = [integers(out, dtype=dtype, seed=9) if number % 2 else None for number, out in enumerate(members)]
    results = ops.low_rank_linear_kernel(x, a, bs, biases)
    for result, expected in zip(results, oracle(x, a, bs, biases), strict=True):
        assert expected.abs().max() <= 256
        assert result.dtype == dtype
        assert torch.equal(result.double(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_error_of_rounding(tokens, dtype):
    """Two roundings to ``dtype``, of the latent and the result, and float32 sums of D_in and R terms."""
    x, a = normal(tokens, 300, dtype=dtype, seed=1), normal(43, 300, dtype=dtype, seed=2)
    bs = [normal(89, 43, dtype=dtype, seed=3)]
    size = oracle(x.abs(), a.abs(), [bs[0].abs()], [None])[0]
    bound = (2 * roundoff(dtype) + (300 + 43) * roundoff(torch.float32)) * size
    (result,) = ops.low_rank_linear_kernel(x, a, bs, [None])
    assert ((result - oracle(x, a, bs, [None])[0]).abs() <= bound).all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_that_lie_apart(tokens):
    """Tensors cut out of wider ones, as when rows are padded for alignment; the rest of those is never used."""
    x = cut_out(integers(tokens, 37, dtype=torch.float32, seed=1))
    a = cut_out(integers(5, 37, dtype=torch.float32, seed=2))
    bs = [cut_out(integers(7, 5, dtype=torch.float32, seed=3)), integers(5, 11, dtype=torch.float32, seed=4).T]
    results = ops.low_rank_linear_kernel(x, a, bs, [None, None])
    for result, expected in zip(results, oracle(x, a, bs, [None, None]), strict=True):
        assert torch.equal(result.double(), expected)
    results = ops.low_rank_linear_kernel(x.reshape(1, tokens, 37), a, bs, [None, None])
    assert [result.shape for result in results] == [(1, tokens, 7), (1, tokens, 11)]


@pytest.mark.parametrize("case", ["tokens", "members", "dtypes", "double"])
def test_out_of_range_is_plain(case):
    tokens, members = 17 if case == "tokens" else 2, 5 if case == "members" else 1
    dtype = torch.float64 if case == "double" else torch.float32
    x = integers(tokens, 8, dtype=dtype, seed=1)
    a = integers(3, 8, dtype=dtype, seed=2)
    bs = [integers(4, 3, dtype=dtype, seed=3)] * members
    if case == "dtypes":
        with pytest.raises(RuntimeError, match="dtype"):  # as torch says of its own linear
            ops.low_rank_linear_kernel(x, a, [bs[0].bfloat16()], [None])
        return
    results = ops.low_rank_linear_kernel(x, a, bs, [None] * members)
    assert len(results) == members
    for result, expected in zip(results, oracle(x, a, bs, [None] * members), strict=True):
        assert torch.equal(result.double(), expected)


def test_gradient_is_that_of_plain_torch():
    x, a, b = (normal(*shape, dtype=torch.float32, seed=1).requires_grad_() for shape in [(3, 8), (2, 8), (5, 2)])
    (result,) = ops.low_rank_linear(x, a, [b])
    result.square().sum().backward()
    expected = torch.autograd.grad((x @ a.T @ b.T).square().sum(), [x, a, b])
    for tensor, grad in zip((x, a, b), expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad)
    with torch.no_grad():
        assert not ops.low_rank_linear(x.to(DEVICE), a, [b])[0].requires_grad


def test_members_without_rows():
    x, a = (normal(*shape, dtype=torch.float32, seed=1) for shape in [(3, 8), (2, 8)])
    none, two = ops.low_rank_linear_kernel(x, a, [x.new_empty(0, 2), x.new_ones(2, 2)], [None, None])
    assert (none.shape, two.shape) == ((3, 0), (3, 2))
