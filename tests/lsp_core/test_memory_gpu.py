"""The stated peak of every stage against what a GPU allocates, within 15 %."""

import pytest
import torch

from lsp_core.memory_check import OFFLOADED, Sizes, check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: max_memory_allocated is CUDA's"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stated_peaks_are_what_a_gpu_allocates(dtype):
    """810M parameters, so that the workspaces of the libraries, some tens of MiB, are small beside the weights."""
    stages = check("llama-810m", dtype=dtype, sizes=Sizes())["stages"]
    ratios = {stage: peak["ratio"] for stage, peak in stages.items()}
    assert all(ratio == pytest.approx(1, abs=0.15) for ratio in ratios.values()), ratios


def test_offloaded_stages_take_a_fraction_of_the_weights():
    stages = check("llama-810m", dtype=torch.bfloat16, sizes=Sizes(length=128, micro_batch=1))["stages"]
    for stage in ("gather", "measure", "teacher", "evaluate"):
        assert stages[f"{stage}{OFFLOADED}"]["measured_bytes"] < 0.6 * stages[stage]["measured_bytes"]
