"""Stated peaks from shapes alone, and the stages that a GPU is measured with."""

import json

import pytest
import torch
from transformers import LlamaConfig

from lsp_core import memory_check
from lsp_core.allocation import uniform_parameters
from lsp_core.discovery import discover_units
from lsp_core.memory_check import OFFLOADED, Sizes, main, measured_peaks
from lsp_core.random_models import Pool, dense_model, materialize, pooled_shapes

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=101, head_dim=16
)
SIZES = ["--length", "16", "--micro-batch", "1"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    return str(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="prints what a machine without a GPU is told")
def test_without_a_gpu_only_stated_figures_are_given(config, capsys):
    assert main([config, *SIZES]) == 0
    out = capsys.readouterr().out
    assert "There is no GPU here: only stated figures are given." in out
    assert "measured" not in out
    assert main([config, *SIZES, "--processes", "4", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    stated = {stage: peak["stated_bytes"] for stage, peak in stages.items()}
    assert all(peak["measured_bytes"] is None and peak["ratio"] is None for peak in stages.values())
    for stage in ("gather", "bases", "measure", "teacher", "evaluate"):
        assert stated[f"{stage}{OFFLOADED}"] < stated[stage]
    assert stated["train sharded on 4"] < stated["train replicated on 4"] < stated["train"]


def test_what_is_no_model_is_one_line(capsys):
    assert main(["nonesuch"]) == 2
    assert capsys.readouterr().err.startswith("error: nonesuch is no folder with a config.json and no shape")


def test_every_stage_that_is_stated_is_run(monkeypatch):
    ran = []
    monkeypatch.setattr(memory_check, "_measured", lambda _, run: ran.append(run()) or len(ran))
    empty = dense_model(CONFIG)
    units = discover_units(empty)
    removed = uniform_parameters(units, 0.5).removed
    pool = Pool(Pool.bytes_for(pooled_shapes(empty), torch.float32), torch.float32, "cpu")
    model = materialize(empty, pool, torch.float32, "cpu")
    found = measured_peaks(model, units, removed, Sizes(length=9, micro_batch=2), "cpu")
    stages = ("bases", "gather", "measure", "evaluate", "teacher")
    assert list(found) == [*(f"{stage}{ending}" for ending in (OFFLOADED, "") for stage in stages), "train"]
