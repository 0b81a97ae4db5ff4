"""The ops on a GPU: compiled kernels at sizes of real models, through the dispatcher, in CUDA graphs, under compile.

The other files of this folder run their kernels on the GPU too where there is one.
"""

import pytest
import torch

from lsp_core import ops, plain
from tests.kernels.draws import normal, roundoff

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false")
BF16 = {"dtype": torch.bfloat16}


def close(result, expected, bound):
    """Checks the root mean square of the error against ``bound`` times that of ``expected``."""
    error = (result.double() - expected.double()).square().mean().sqrt()
    assert error <= bound * expected.double().square().mean().sqrt(), error


def group(tokens, rank):
    """A Llama-2-7B Q/K/V group."""
    x, a = normal(tokens, 4096, seed=1, **BF16), normal(rank, 4096, seed=2, **BF16) / 64
    return x, a, [normal(width, rank, seed=3, **BF16) / 32 for width in (4096, 1024, 1024)]


@pytest.mark.parametrize("rank", [1200, 1203])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_low_rank_linear(tokens, rank):
    x, a, bs = group(tokens, rank)
    results = ops.low_rank_linear(x, a, bs)
    expected = plain.low_rank_linear(x.double(), a.double(), [b.double() for b in bs], [None] * 3)
    for result, wanted in zip(results, expected, strict=True):
        close(result, wanted, 4 * roundoff(torch.bfloat16))


def attention(batch, context, heads=32, own=8, width=128, rank=512):
    angle = torch.arange(context, device="cuda")[:, None] * 10000 ** -(torch.arange(64, device="cuda") / 64)
    angle = torch.cat([angle, angle], -1).expand(batch, -1, -1)
    length = torch.randint(context // 2, context + 1, (batch, 1), device="cuda")
    query, latent = normal(batch, heads, width, seed=1, **BF16), normal(batch, context, rank, seed=2, **BF16)
    return (query, latent, normal(batch, context, rank, seed=3, **BF16), normal(own, width, rank, seed=4, **BF16)), {
        "key_bias": normal(own * width, seed=5, **BF16),
        "cos": angle.cos().bfloat16(),
        "sin": angle.sin().bfloat16(),
        "keep": torch.arange(context, device="cuda") < length,
        "scale": (width * rank) ** -0.5,
        "norm": None,
        "eps": 0.0,
    }


def in_double(positional, named):
    """The plain op's arguments in float64."""
    order = ("key_bias", "cos", "sin", "keep", "scale", "norm", "eps")
    wide = [*positional, *(named[name] for name in order)]
    return [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in wide]


@pytest.mark.parametrize("absent", ["norm", "key_bias cos sin"])
@pytest.mark.parametrize(("batch", "context"), [(1, 4096), (4, 1000), (1, 1)])
def test_latent_decode_attention(batch, context, absent):
    positional, named = attention(batch, context)
    named["norm"] = normal(128, seed=6, **BF16)
    named |= dict.fromkeys(absent.split())
    if named["norm"] is not None:
        named["scale"], named["eps"] = 128**-0.5, 1e-6
    expected = plain.latent_decode_attention(*in_double(positional, named))
    close(ops.latent_decode_attention(*positional, **named), expected, 8 * roundoff(torch.bfloat16))


def test_latent_value_attention_on_long_offsets():
    """More than 2^31 elements of the latent and of the keys."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("less than 8 GiB free on the GPU")
    context = 2**22 + 77
    query = normal(1, 4, 512, seed=1, **BF16)
    keys = torch.randn(1, 1, context, 512, device="cuda", dtype=torch.bfloat16)
    keep = torch.zeros(1, context, dtype=torch.bool, device="cuda")
    keep[:, -300:] = True
    result = ops.latent_value_attention(query, keys, keys[:, 0], scale=0.04, keep=keep)
    tail = keys[:, :, -300:].double()
    expected = plain.latent_value_attention(query.double(), tail, tail[:, 0], None, 0.04)
    close(result, expected, 8 * roundoff(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_project_and_its_gradients(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    x, u = normal(2, 700, 1024, seed=1, dtype=dtype), torch.linalg.qr(normal(1024, 611, seed=2, dtype=torch.float32))[0]
    x, u = x.requires_grad_(), u.to(dtype).requires_grad_()
    scales = [(torch.rand(611, device="cuda") > 0.1).to(dtype) * 0.5 for _ in range(3)]
    grads = [normal(2, 700, 1024, seed=3 + member, dtype=dtype) for member in range(3)]
    results = ops.project(x, u, scales)
    assert type(results[0].grad_fn).__name__ != "SubBackward0"  # the op, not plain torch
    mine = torch.autograd.grad(results, [x, u], grads)
    wide = x.detach().double().requires_grad_(), u.detach().double().requires_grad_()
    expected = plain.project(*wide, [scale.double() for scale in scales])
    wanted = torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    unit = max(roundoff(dtype), 2.0**-11)  # TF32 has 11 bits
    for one, other in zip([*results, *mine], [*expected, *wanted], strict=True):
        close(one.detach(), other.detach(), 4 * unit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_softmax_statistics(dtype, bias):
    h, weight = normal(300, 512, seed=1, dtype=dtype), normal(32003, 512, seed=2, dtype=dtype) / 16
    offset = normal(32003, seed=3, dtype=dtype) if bias else None
    wide = h.double(), weight.double(), None if offset is None else offset.double()
    expected = plain.softmax_statistics(*wide, 4096)
    results = ops.softmax_statistics(h, weight, offset, 4096)
    close(results[0], expected[0], 1e-6)
    close(results[1], expected[1], 2.0**-14 if dtype == torch.bfloat16 else 1e-5)
    close(ops.log_partition(h, weight, offset, 4096), expected[0], 1e-6)
    if bias:
        close(results[2], expected[2], 1e-5)


def test_cuda_graph_and_compile_give_the_same():
    """Captured once and replayed on other numbers; traced by torch.compile without a break."""
    x, a, bs = group(1, 1200)
    positional, named = attention(1, 512)

    def step(x):
        q, _, _ = ops.low_rank_linear(x, a, bs)
        return ops.latent_decode_attention(q.view(1, 32, 128), *positional[1:], **named)

    with torch.no_grad():
        step(x)  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(x)
        x.copy_(normal(1, 4096, seed=9, **BF16))
        graph.replay()
        expected = step(x)
        assert torch.equal(captured, expected)
        assert torch.equal(torch.compile(step, fullgraph=True)(x), expected)
        assert torch.equal(torch.compile(step, fullgraph=True, mode="reduce-overhead")(x), expected)


def test_same_bits_every_time():
    x, a, bs = group(1, 1203)
    first = ops.low_rank_linear(x, a, bs)
    for _ in range(5):
        assert all(map(torch.equal, first, ops.low_rank_linear(x, a, bs)))
