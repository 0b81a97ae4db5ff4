"""The registration of the ops: schemas, fake implementations, autograd, torch.compile, and what runs on CPU."""

import subprocess
import sys

import pytest
import torch

from lsp_core import ops, plain
from tests.kernels.draws import normal

CPU = {"seed": 0, "dtype": torch.float32}


def numbers(*shape):
    return normal(*shape, **CPU).cpu()


def attention(**changes):
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, :4] = False
    angle = numbers(2, 9, 4)
    return {
        "query": numbers(2, 4, 6),
        "latent_k": numbers(2, 9, 5),
        "latent_v": numbers(2, 9, 7),
        "key_factor": numbers(2, 6, 5),
        "key_bias": numbers(12),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "keep": keep,
        "scale": 0.4,
        "norm": numbers(6),
        "eps": 1e-6,
    } | changes


bare = {"key_bias": None, "cos": None, "sin": None, "keep": None, "norm": None}
CASES = {
    "low_rank_linear": (numbers(2, 3, 8), numbers(4, 8), [numbers(5, 4), numbers(6, 4)], [None, numbers(6)]),
    "latent_decode_attention": tuple(attention().values()),
    "latent_decode_attention absorbed": tuple(attention(**bare).values()),
    "latent_value_attention": (numbers(2, 4, 6), numbers(2, 2, 9, 6), numbers(2, 9, 7), attention()["keep"], 0.4),
    "project": (numbers(2, 5, 8).requires_grad_(), numbers(8, 3).requires_grad_(), numbers(2, 3)),
    "project_backward": ([numbers(2, 5, 8)] * 2, numbers(2, 5, 8), numbers(8, 3), numbers(2, 3), numbers(2, 10, 16)),
    "softmax_statistics": (numbers(5, 8), numbers(11, 8), numbers(11), 4),
    "softmax_statistics bfloat16": (numbers(5, 8).bfloat16(), numbers(11, 8).bfloat16(), None, 4),
    "log_partition": (numbers(5, 8), numbers(11, 8), None, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    """Schema, fake implementation with static and dynamic shapes, and autograd registration."""
    torch.library.opcheck(getattr(torch.ops.lsp, name.split()[0]).default, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_runs_on_cpu(name):
    op = name.split()[0]
    results = getattr(torch.ops.lsp, op)(*CASES[name])
    if not op.startswith("project"):  # its float64 oracle is in test_projected.py
        torch.testing.assert_close(results, getattr(plain, op)(*CASES[name]), rtol=0, atol=0)


def everything(x, u, scales, a, bs, weight, arguments):
    """A function that goes through each of the public functions."""
    first, second = ops.project(x, u, scales)
    q, k = torch.ops.lsp.low_rank_linear(first.detach() + second.detach(), a, bs, [None, None])
    attended = ops.latent_decode_attention(**arguments)
    keys = k.reshape(1, 1, -1, 6).expand(2, 2, -1, -1)
    attended = attended + ops.latent_value_attention(
        arguments["query"], keys, keys[:, 0, :, :1].expand(-1, -1, 7), scale=2
    )
    flat = q.reshape(-1, q.shape[-1])
    log_partition, mean, _ = ops.softmax_statistics(flat, weight, None, 4)
    return first.square().sum() + second.sum(), (
        attended,
        log_partition,
        mean,
        ops.log_partition(flat, weight, None, 4),
    )


def test_compiles_without_a_graph_break():
    """Forward and backward, once with static and once with dynamic sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True)
    for tokens in (3, 5):
        u, scales = numbers(8, 3), list(numbers(2, 3))
        fixed = (numbers(4, 8), [numbers(5, 4), numbers(6, 4)], numbers(11, 5), attention())
        leaves = [[numbers(2, tokens, 8).requires_grad_(), u.clone().requires_grad_()] for _ in range(2)]
        losses = []
        for function, (x, own) in zip((everything, compiled), leaves, strict=True):
            loss, others = function(x, own, scales, *fixed)
            loss.backward()
            losses.append([loss, *others])
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
        for eager, mine in zip(*leaves, strict=True):
            torch.testing.assert_close(eager.grad, mine.grad, rtol=1e-5, atol=1e-5)


def test_cpu_needs_no_triton():
    """Importing the ops loads no kernel, and where triton is absent they run."""
    program = (
        "import importlib.util, sys, torch\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else found(name, *rest)\n"
        "from lsp_core import ops\n"
        "assert not ops.HAS_TRITON\n"
        "one = torch.ones(1, 2)\n"
        "assert torch.ops.lsp.low_rank_linear(one, one, [torch.ones(3, 1)], [None])[0].tolist() == [[2, 2, 2]]\n"
        "assert not any(name.startswith('lsp_kernels') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_either_way_to_ask_for_tf32():
    """After the newer setting the older one raises where it is read; each in a process of its own."""
    for setting in ("allow_tf32 = True", "fp32_precision = 'tf32'"):
        program = (
            "import torch\n"
            "from lsp_core import ops\n"
            f"torch.backends.cuda.matmul.{setting}\n"
            "one = torch.ones(1, 2)\n"
            "ops.project(one, torch.ones(2, 1), [torch.ones(1)])\n"
            "assert ops._tf32()\n"
            "compiled = torch.compile(lambda x: x + 1 if ops._tf32() else x, fullgraph=True, backend='eager')\n"
            "assert compiled(one).tolist() == [[2, 2]]\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_no_copy_of_what_a_batch_multiplies():
    """Keys (B, T, H_kv, d) as heads, and one factor for all sequences, in no more memory than the result needs."""
    from torch.profiler import ProfilerActivity, profile

    keys, query = numbers(3, 500, 2, 16).transpose(1, 2), numbers(3, 2, 2, 16)
    factor = numbers(2, 16, 500)
    for matrices in (keys.mT, factor[None]):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = plain.grouped_product(query, matrices)
        allocated = sum(event.self_cpu_memory_usage for event in seen.events() if event.self_cpu_memory_usage > 0)
        assert allocated <= 2 * result.nbytes
        expected = torch.einsum("bgma,bgan->bgmn", query.double(), matrices.double().expand(3, -1, -1, -1))
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
