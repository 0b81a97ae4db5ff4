"""Statistics of a softmax over chunks of a vocabulary: kernels and plain torch against full logits in float64."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from lsp_core import ops, plain
from lsp_kernels.softmax import MAX_CHUNK
from tests.kernels.draws import DEVICE, DTYPES, normal, roundoff

IMPLEMENTATIONS = {
    "kernel": (ops.softmax_statistics_kernel, ops.log_partition_kernel),
    "plain": (plain.softmax_statistics, plain.log_partition),
}
BOTH = pytest.mark.parametrize("functions", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())


def oracle(h, weight, bias):
    logits = F.linear(h.double(), weight.double(), None if bias is None else bias.double())
    mass = logits.softmax(-1)
    mean_bias = torch.zeros_like(mass[:, 0]) if bias is None else mass @ bias.double()
    return logits.logsumexp(-1), mass @ weight.double(), mean_bias


def tolerances(h, weight, bias):
    """A logit is a float32 sum of D terms; an error of it moves each statistic at most twice as far, times its size.

    Masses are float32, or bfloat16 high + low, which is off by 2^-16 where both are truncated.
    """
    size = F.linear(h.abs().double(), weight.abs().double(), None if bias is None else bias.abs().double()).max().item()
    delta = (h.shape[1] + 4) * roundoff(torch.float32) * size
    mass = 2.0**-16 if h.dtype == weight.dtype == torch.bfloat16 else len(weight) * roundoff(torch.float32)
    return [
        delta + len(weight) * roundoff(torch.float32),
        (2 * delta + 2 * mass) * weight.abs().max().item(),
        (2 * delta + 2 * mass) * (0 if bias is None else bias.abs().max().item()),
    ]


@BOTH
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "chunk"), [(1, 1, 1, 1), (5, 11, 147, 4096), (7, 5, 147, 31), (3, 64, 257, 64)]
)
def test_against_full_logits(tokens, width, vocabulary, chunk, dtype, bias, functions):
    h, weight = normal(tokens, width, dtype=dtype, seed=1), normal(vocabulary, width, dtype=dtype, seed=2)
    offset = normal(vocabulary, dtype=dtype, seed=3) if bias else None
    statistics, partition = functions
    expected, bounds = oracle(h, weight, offset), tolerances(h, weight, offset)
    results = statistics(h, weight, offset, chunk)
    for result, wanted, bound in zip(results, expected, bounds, strict=True):
        assert result.dtype == torch.float32
        assert (result - wanted).abs().max() <= bound
    assert (partition(h, weight, offset, chunk) - expected[0]).abs().max() <= bounds[0]


@BOTH
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_do_not_overflow(size, functions):
    """float32 exponentials end at 88; the largest logit is in the last chunk, or in the first."""
    weight = torch.cat([torch.full((147, 1), size) + torch.arange(147.0)[:, None], torch.ones(147, 1)], 1).to(DEVICE)
    h = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, 0.0]], device=DEVICE)
    for result, wanted in zip(functions[0](h, weight, None, 16), oracle(h, weight, None), strict=True):
        assert ((result - wanted).abs() <= 1e-3 + 1e-5 * wanted.abs()).all()  # float32 holds 1e4 to 1e-3


def test_dtypes_that_differ_and_chunks_out_of_range():
    h, weight = normal(4, 6, dtype=torch.float32, seed=1), normal(40, 6, dtype=torch.bfloat16, seed=2)
    for left, right, chunk in ((h, weight, 16), (h, weight, MAX_CHUNK + 1), (h.double(), weight, 16)):
        expected, bounds = oracle(left, right, None), tolerances(left, right, None)
        results = ops.softmax_statistics_kernel(left, right, None, chunk)
        for result, wanted, bound in zip(results, expected, bounds, strict=True):
            assert result.dtype == torch.promote_types(left.dtype, torch.float32)
            assert (result - wanted).abs().max() <= bound
        assert (ops.log_partition_kernel(left, right, None, chunk) - expected[0]).abs().max() <= bounds[0]


@BOTH
def test_tokens_that_are_ruled_out(functions):
    """A bias of -inf on a whole first chunk, on some of the next and on the last."""
    h, weight = normal(5, 6, dtype=torch.float32, seed=1), normal(40, 6, dtype=torch.float32, seed=2)
    bias = normal(40, dtype=torch.float32, seed=3)
    bias[:9] = bias[10] = bias[-4:] = -torch.inf
    log_partition, mean_row, mean_bias = functions[0](h, weight, bias, 4)
    left = bias.isfinite()
    expected, bounds = oracle(h, weight[left], bias[left]), tolerances(h, weight[left], bias[left])
    for result, wanted, bound in zip((log_partition, mean_row, mean_bias), expected, bounds, strict=True):
        assert (result - wanted).abs().max() <= bound
    assert (functions[1](h, weight, bias, 4) - expected[0]).abs().max() <= bounds[0]


def test_no_tokens():
    h, weight = torch.ones(0, 4, device=DEVICE), torch.ones(7, 4, device=DEVICE)
    assert [tuple(part.shape) for part in ops.softmax_statistics_kernel(h, weight, None, 4)] == [(0,), (0, 4), (0,)]
    assert ops.log_partition_kernel(h, weight, None, 4).shape == (0,)
