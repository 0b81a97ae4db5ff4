"""What several test folders share: a tiny random Llama with a byte-level tokenizer, text, and a Prefect server."""

import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.disks import mounted
from tests.s3 import environment, serving, using

os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():  # Triton's interpreter; read when triton is imported, and importing torch does not
    os.environ.setdefault("TRITON_INTERPRET", "1")

POSITIONS = 64
END_OF_TEXT = "<|endoftext|>"


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """One temporary Prefect server and database for the whole session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Returns the URL of one S3 server for the whole session."""
    with serving() as url:
        yield url


@pytest.fixture
def s3_bucket(s3_server: str, tmp_path: Path) -> Iterator[str]:
    """Returns the name of a bucket of this test, to be made by whoever writes to it, on a machine of this test."""
    with using(environment(s3_server) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}):
        yield f"bucket-{uuid.uuid4().hex}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Returns the folder of a disk of 256 KiB."""
    with mounted(tmp_path / "disk", kib=256):
        yield tmp_path / "disk"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a random Llama of 2 blocks, hidden width 32, and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, END_OF_TEXT])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,  # large enough for a truncation to be seen in the logits
        bos_token_id=len(alphabet),
        eos_token_id=len(alphabet),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the paths of a text to train on and of one to test on."""
    folder = tmp_path_factory.mktemp("tiny-text")
    words = random.Random(0)
    paths = {}
    for split, count in (("train", 4000), ("test", 300)):
        paths[split] = folder / f"{split}.txt"
        paths[split].write_text(" ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(count)))
    return paths
