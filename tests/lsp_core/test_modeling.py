"""Saving and loading: the same logits in another process, one file, loud errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lsp_core
from lsp_core.merging import merge_model
from lsp_core.modeling import load_compressed, save_compressed
from lsp_core.modeling_lsp import FactoredLinear

FRESH_PROCESS = """
import sys, torch
from safetensors.torch import load_file, save_file
from lsp_core.modeling import load_compressed
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = load_compressed(folder)
    ids = load_file(folder + "/../ids.safetensors")["ids"]
    with torch.no_grad():
        save_file({"logits": model(input_ids=ids).logits}, folder + "/../" + folder.rpartition("/")[2] + ".logits")
"""


@pytest.fixture
def save(prepare, make_model, tmp_path):
    """Merges a model of a family, saves it; returns the model and the folder."""

    def merge_and_save(family="llama", dtype=torch.float32, dense=(), **options):
        case = prepare(family)
        model = make_model(family, dtype)
        vectors = {name: v for name, v in case.perturbed().items() if case.by_name[name].block not in dense}
        merge_model(model, case.units, vectors, **options)
        folder = tmp_path / f"{family}-{str(dtype)[6:]}"
        save_compressed(model, case.units, folder, facts={"ratio": 0.5})
        return model, folder, case

    return merge_and_save


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_a_fresh_process_gives_the_same_logits_bit_for_bit(save, tmp_path):
    """One process for all: every kind of tie, biases, tied embeddings, Conv1D, a block left dense, both dtypes."""
    saved = [
        save("llama", torch.float32),
        save("llama", torch.bfloat16),
        save("opt", torch.float32, dense=(1,)),
        save("gpt2", torch.bfloat16),
        save("qwen3", torch.float32, tolerance=1.0),
    ]
    ids = saved[0][2].tokens
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    environment = os.environ | {"PYTHONPATH": str(Path(lsp_core.__file__).parents[1])}
    command = [sys.executable, "-c", FRESH_PROCESS, *(str(folder) for _, folder, _ in saved)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    for model, folder, _ in saved:
        loaded = load_file(tmp_path / f"{folder.name}.logits")["logits"]
        assert loaded.dtype == model.dtype
        assert torch.equal(loaded, logits_of(model, ids)), folder.name


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_the_file_holds_every_parameter_once(save, family):
    model, folder, case = save(family)
    stored = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    loaded = load_compressed(folder)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    for unit in case.units:
        layers = [loaded.model.get_submodule(name) for name in unit.members]
        shared = {id(layer.input_factor if unit.side == "input" else layer.output_factor) for layer in layers}
        assert len(shared) == 1
        if unit.side == "input" and len(layers) > 1:
            assert layers[0].input_factor._once.readers == len(layers)
    assert not loaded.training


def test_config_describes_the_units_and_carries_the_facts(save):
    _, folder, case = save("qwen3", dense=(1,))
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "lsp"
    assert config["facts"] == {"ratio": 0.5}
    assert [unit["name"] for unit in config["units"]] == [unit.name for unit in case.units if unit.block == 0]
    ranks = {unit["name"]: unit["rank"] for unit in config["units"]}
    assert all(rank == case.by_name[name].dimension - case.removed[name] for name, rank in ranks.items())
    assert {path.name for path in folder.iterdir() if path.suffix not in (".json", ".safetensors")} == {
        "modeling_lsp.py"
    }


def test_loaded_model_generates(save):
    model, folder, case = save("llama")
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(case.tokens[:2, :4], **options)
    assert torch.equal(load_compressed(folder).generate(case.tokens[:2, :4], **options), expected)


def test_saving_a_loaded_model_gives_the_same_bytes(save, tmp_path):
    _, folder, _ = save("llama")
    load_compressed(folder).save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json", "modeling_lsp.py", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_missing_config_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_compressed(tmp_path)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_compressed(tmp_path / "nowhere")


def test_plain_model_is_an_error(make_model, tmp_path):
    make_model("llama", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'llama' model, not a compressed one"):
        load_compressed(tmp_path)


def test_missing_weights_are_an_error(save):
    _, folder, _ = save()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_compressed(folder)


FACTOR = "model.model.layers.1.mlp.gate_proj.input_factor.linear.weight"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda weights: weights.pop(FACTOR), f"missing: {FACTOR}"),
        (lambda weights: weights.update(stranger=torch.zeros(3)), "too many: stranger"),
        (lambda weights: weights.update({FACTOR: torch.zeros(3, 48)}), f"misshapen: {FACTOR}"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_weights_that_do_not_fit_are_an_error(save, damage, named):
    _, folder, _ = save()
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"do not fit its config \(.*{named}"):
        load_compressed(folder)


def test_layers_are_factored_after_loading(save):
    model, folder, _ = save("gpt2")
    loaded = load_compressed(folder)
    factored = [[n for n, m in x.named_modules() if isinstance(m, FactoredLinear)] for x in (model, loaded.model)]
    assert factored[0] == factored[1]
    assert factored[0]
