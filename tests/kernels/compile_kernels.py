"""Compiles every kernel, as its launcher calls it, for a GPU that need not be there, and prints what it uses.

Run as a program, without Triton's interpreter: ``python compile_kernels.py 90`` for compute capability 9.0. A line of
JSON for each kernel: its name, bytes of shared memory, and how often its code uses the matrix units.
"""

import json
import re
import sys

import torch
from triton import compile as build
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lsp_kernels import latent_scores, latent_values, low_rank_linear, projected, softmax

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.bool: "*i1"}
BF16 = torch.bfloat16


def record(kernel: JITFunction, *args, grid, warmup, **options) -> None:
    """Compiles ``kernel`` for these arguments, specialized as a launch would, instead of launching it."""
    built = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    given = dict(zip([p.name for p in kernel.params], args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            tensor = isinstance(value, torch.Tensor)
            signature[name] = POINTERS[value.dtype] if tensor else "i32"
            if tensor or value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    result = build(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=built)
    units = len(re.findall(r"mma\.sync|wgmma\.mma_async", result.asm["ptx"]))
    print(json.dumps({"kernel": kernel.__name__, "shared": result.metadata.shared, "matrix_units": units}), flush=True)


def main() -> None:
    JITFunction.run = record

    def make(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    for tokens, rank in ((1, 1200), (1, 1203), (5, 1200)):
        bs, biases = [make(4096, rank), make(1024, rank), make(1024, rank)], [None, make(1024), None]
        low_rank_linear.low_rank_linear(make(tokens, 4096), make(rank, 4096), bs, biases)
    keep, angles = make(2, 300, dtype=torch.bool), make(2, 300, 128)
    query, latent = make(2, 8, 128), make(2, 300, 512)
    for cos, norm in ((angles, make(128)), (angles[..., :32], None), (None, make(128))):
        factor = make(2, 128, 512)
        scores = latent_scores.rebuilt_scores(query, latent, factor, make(256), cos, cos, keep, 0.1, norm, 1e-6)
    latent_scores.stored_scores(query, make(2, 2, 300, 128), keep, 0.1)
    latent_values.aggregate(scores, latent, keep, BF16)
    x, u, scales = make(300, 1024), make(1024, 600), make(3, 600)
    *grads, narrow = projected.project(x, u, scales)
    projected.project_backward(grads, x, u, scales, narrow)
    softmax.softmax_statistics(make(5, 64), make(512, 64), make(512), 512)
    softmax.log_partition(make(5, 64), make(512, 64), None, 512)


main()
