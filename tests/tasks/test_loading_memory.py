"""The most memory that loading a sharded checkpoint takes, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONFIG = LlamaConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, vocab_size=4096
)

SCRIPT = """
import json, sys
from contextlib import nullcontext
from pathlib import Path
import transformers.models.llama.modeling_llama
from lsp_core.offload import offloaded
from tasks.models import find_model, load_model

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024

offload = sys.argv[2] == "offload"
source = find_model(sys.argv[1], digest=lambda path: "0" * 64)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
model = load_model(source, "cpu", offload=offload)
with offloaded(model, "cpu") if offload else nullcontext():
    print(json.dumps([resident("VmHWM") - before, sum(p.nbytes for p in model.parameters())]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    LlamaForCausalLM(CONFIG).save_pretrained(folder, max_shard_size="40MB")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 5
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
@pytest.mark.parametrize("offload", ["offload", "whole"])
def test_loading_never_holds_the_weights_twice(checkpoint: Path, offload: str) -> None:
    """Weights of the checkpoint's dtype stay mapped; what else there is: a flag for each number of one weight while it
    is checked, and with offload a block that is laid out anew.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), offload]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    peak, weights = json.loads(process.stdout.splitlines()[-1])
    assert weights == sum(p.nbytes for p in _skeleton().parameters())
    assert weights <= peak <= 1.5 * weights


def _skeleton() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG)
