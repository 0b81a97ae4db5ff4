"""What is not taken for granted: lengths as the probe's, blocks that run once, weights of one layer, no padding."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    Qwen3Config,
    ViTConfig,
)

from lsp_core.discovery import Group, discover, discover_units
from lsp_core.gram import NonFiniteError, gather_grams
from lsp_core.inputs import inputs_of
from lsp_core.readout import Readout
from lsp_core.sensitivity import Sensitivity
from lsp_core.training import Trainer, train_projectors
from lsp_core.training_settings import TrainingSettings
from tests.contract.cases import prepare

SMALL = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 61}
GROUPED = Qwen3Config(**SMALL, num_hidden_layers=2, num_key_value_heads=2, head_dim=6)


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_positions_are_those_of_the_data_and_not_of_the_probe():
    model = BertModel(BertConfig(**SMALL, num_hidden_layers=1, pad_token_id=None)).eval()
    ids = torch.arange(3 * 19).view(3, 19) % 61
    readout = Readout(model)
    assert readout.kept(ids) is None
    assert readout.count(ids) == 3 * 19
    outputs = readout.outputs(ids)
    assert readout.divergence(outputs, readout.statistic(outputs)).shape == (3 * 19,)


def test_of_a_block_that_runs_several_times_the_last_output_is_read():
    torch.manual_seed(0)
    config = AlbertConfig(**SMALL, embedding_size=12, num_hidden_layers=3, num_hidden_groups=1)
    model = AlbertModel(config).eval()
    ids = torch.arange(1, 15).view(2, 7)
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        outputs = Readout(model).outputs(ids)
    assert torch.equal(outputs, states[-1])
    assert not torch.equal(outputs, states[1])


def test_blocks_out_of_order_are_measured_where_nothing_is_streamed(monkeypatch):
    case = prepare("llama", "float32")
    sensitivity = Sensitivity(case.copy_model(), case.units, case.bases, case.examples, micro_batch=3)
    last, first = case.units[-1], case.units[0]
    in_order = [sensitivity.measure(unit.name, case.removed[unit.name]) for unit in (first, last)]
    with pytest.raises(ValueError, match="go in order"):
        sensitivity.measure(first.name, case.removed[first.name])
    sensitivity.stream.possible = False
    out_of_order = [sensitivity.measure(unit.name, case.removed[unit.name]) for unit in (last, first)]
    assert out_of_order == pytest.approx(in_order[::-1], rel=1e-4)


def test_layers_that_share_a_parameter_are_left_alone():
    model = on_meta(LlamaConfig(**SMALL, num_hidden_layers=3))
    shared = model.model.layers[0].mlp.down_proj.weight
    for layer in model.model.layers[1:]:
        layer.mlp.down_proj.weight = shared
    found = discover(model)
    assert not any("down_proj" in unit.name for unit in found.units)
    names = {f"model.layers.{block}.mlp.down_proj" for block in range(3)}
    assert {n for n, reason in found.left_alone.items() if reason == "shares its weight with another layer"} == names


@pytest.mark.parametrize(
    "options", [{"exclude": ["*.k_proj"]}, {"groups": [Group(members=("*.k_proj",), side="output")]}]
)
def test_grouped_queries_without_their_keys_are_single(options):
    units = discover_units(on_meta(GROUPED), **options)
    first = [unit.members for unit in units if unit.block == 0 and "self_attn" in unit.name]
    singles = [(f"model.layers.0.self_attn.{letter}_proj",) for letter in "qvo"]
    assert [members for members in first if "k_proj" not in members[0]] == singles
    with pytest.raises(ValueError, match="needs one key and one value"):
        discover_units(on_meta(GROUPED), kv_routing="output", exclude=["*.k_proj"])


def test_pixels_are_normalized_before_they_are_rounded():
    config = ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, image_size=8, patch_size=4
    )
    model = AutoModelForImageClassification.from_config(config, dtype=torch.bfloat16)
    pixels = torch.arange(3 * 8 * 8).view(1, 3, 8, 8).remainder(256).to(torch.uint8)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    given = inputs_of(model, mean=mean, std=std).arguments(pixels, model)["pixel_values"]
    wide = [torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (mean, std)]
    expected = (pixels.double() / 255 - wide[0]) / wide[1]
    # one rounding to bfloat16, after a few to float32
    bound = torch.finfo(torch.bfloat16).eps / 2 * expected.abs() + 8 * torch.finfo(torch.float32).eps
    assert ((given.double() - expected).abs() <= bound).all()


class _ReadsTwice(nn.Module):
    """Calls a layer on its input put twice, as a layer does that also reads embeddings of positions."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, x], 1))[:, : x.shape[1]]


def test_a_layer_that_reads_other_positions_than_the_tokens_is_named_where_there_is_padding():
    model = BertModel(BertConfig(**SMALL, num_hidden_layers=1, pad_token_id=0)).eval()
    units = [unit for unit in discover_units(model) if "intermediate" in unit.name]
    layer = model.encoder.layer[0].intermediate
    layer.dense, dense = _ReadsTwice(layer.dense), layer.dense
    units = [dataclasses.replace(unit, members=(f"{unit.members[0]}.layer",)) for unit in units]
    assert layer.dense.layer is dense
    with pytest.raises(ValueError, match=r"intermediate.dense.layer reads 28 positions of 14 tokens.*exclude it"):
        gather_grams(model, units, torch.arange(14).view(2, 7), micro_batch=2)


@pytest.mark.parametrize("keep", [None, True])
def test_of_a_training_that_diverges_the_best_epoch_is_kept_where_that_is_asked_for(monkeypatch, keep):
    case = prepare("llama", "float32")
    settings = TrainingSettings(learning_rate=1e-3, epochs=4, batch_sequences=4, micro_batch=4, keep_diverged=keep)
    given = (case.copy_model(), case.units, case.bases, case.removed, case.examples, case.examples[:3], settings)
    accumulate = Trainer.accumulate

    def diverging(self, step):
        if step == 5:  # of two an epoch
            raise NonFiniteError("the training loss is inf at step 6: lower the learning rate")
        return accumulate(self, step)

    monkeypatch.setattr(Trainer, "accumulate", diverging)
    if not keep:
        with pytest.raises(NonFiniteError):
            train_projectors(*given)
        return
    result = train_projectors(*given)
    assert result.diverged == "the training loss is inf at step 6: lower the learning rate"
    assert len(result.history) == 3
    assert result.best_epoch <= 2
