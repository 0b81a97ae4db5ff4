"""The teacher stage and the training stage, for a head that is more than a matrix."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from lsp_core.discovery import discover_units
from lsp_core.gram import gather_grams
from lsp_core.readout import Readout
from storage.digest import digest_folder
from storage.grid import save_tokens
from storage.store import ArtifactRef
from storage.tensors import load_tensors, save_tensors
from tasks.artifacts import write_json, write_units
from tasks.caching import Work
from tasks.models import ModelSource, find_model, load_model
from tasks.train import teacher, train


@pytest.fixture(scope="module")
def softcapped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Returns a random Gemma 2, whose logits go through a tanh."""
    folder = tmp_path_factory.mktemp("softcapped")
    for file in tiny_model.glob("token*"):
        shutil.copy(file, folder)
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        final_logit_softcapping=2.0,
        initializer_range=0.2,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return find_model(str(folder))


class Plain(Work):
    """Reads plain folders: what the store does is tested elsewhere."""

    def folder(self, ref: ArtifactRef) -> Path:
        return Path(ref.uri)


def reference_to(folder: Path) -> ArtifactRef:
    return ArtifactRef(kind="plain", key="0", uri=str(folder), digest=digest_folder(folder)[0], num_bytes=0)


def test_the_teacher_of_a_softcapped_head_is_not_kept_and_training_does_without(
    softcapped: ModelSource, work: Work, tmp_path: Path
) -> None:
    """Its statistic would have as many numbers a token as there are words."""
    model = load_model(softcapped, "cpu")
    assert Readout(model).head is None
    ids = np.random.default_rng(0).integers(0, 256, (6, 12))
    save_tokens(tmp_path / "tokens", ids)
    tokens = reference_to(tmp_path / "tokens")
    made = {name: Plain(**vars(replace(work, output=tmp_path / name))) for name in ("teacher", "with", "without")}
    for name in made:
        (tmp_path / name).mkdir()

    teacher.function(made["teacher"], model=softcapped, tokens=tokens)
    assert load_tensors(tmp_path / "teacher") == {}
    assert sum(path.stat().st_size for path in (tmp_path / "teacher").iterdir()) < 100

    units = discover_units(model, kv_routing="input")
    (tmp_path / "bases").mkdir()
    write_units(tmp_path / "bases", units)
    grams = gather_grams(model, units, torch.from_numpy(ids), micro_batch=3)
    save_tensors(tmp_path / "bases", {name: torch.linalg.eigh(gram)[1].flip(-1) for name, gram in grams.items()})
    (tmp_path / "allocation").mkdir()
    write_json(tmp_path / "allocation" / "allocation.json", {"removed": {u.name: u.dimension // 2 for u in units}})
    arguments = {
        "model": softcapped,
        "bases": reference_to(tmp_path / "bases"),
        "allocation": reference_to(tmp_path / "allocation"),
        "tokens": tokens,
        "validation": tokens,
        "objective": "kl",
        "learning_rate": 1e-3,
        "epochs": 1,
        "batch_sequences": 3,
    }
    train.function(made["with"], **arguments, dense_outputs=reference_to(tmp_path / "teacher"))
    shutil.rmtree(work.scratch)
    train.function(made["without"], **arguments)
    assert set(load_tensors(tmp_path / "with")) == {unit.name for unit in units}
    assert digest_folder(tmp_path / "with") == digest_folder(tmp_path / "without")
