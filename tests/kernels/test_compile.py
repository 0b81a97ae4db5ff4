"""Every kernel compiles for GPUs that are not here: what the interpreter accepts, the compiler may not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")

PROGRAM = Path(__file__).with_name("compile_kernels.py")
ROOT = PROGRAM.parents[2]
PRODUCTS = {"_rebuilt_scores_kernel", "_stored_scores_kernel", "_aggregate_kernel", "_scaled_product_kernel",
            "_subtracted_product_kernel"}  # fmt: skip
# bytes of shared memory that a program may have: https://docs.nvidia.com/cuda/cuda-c-programming-guide
SHARED = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, str(PROGRAM), str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    names = {kernel["kernel"] for kernel in kernels}
    assert names == PRODUCTS | {"_latent_kernel", "_expand_kernel", "_combine_kernel", "_chunk_kernel"}
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["kernel"] not in PRODUCTS or kernel["matrix_units"], kernel
