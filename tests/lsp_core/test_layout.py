"""Laying weights out changes where their numbers lie and nothing else."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lsp_core.layout import lay_out
from lsp_core.modeling_lsp import FactoredLinear, Shared
from lsp_core.random_models import Pool, described_units, materialize, pooled_shapes, tied_model

CONFIG = LlamaConfig(
    hidden_size=24,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=37,
)


def compressed(dtype: torch.dtype) -> torch.nn.Module:
    model = tied_model(CONFIG, described_units(CONFIG, 0.5))
    pool = Pool(Pool.bytes_for(pooled_shapes(model), dtype), dtype, "cpu", scale=0.2)
    materialize(model, pool, dtype, "cpu")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_shapes_and_checkpoints_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    model, tokens = compressed(dtype), torch.arange(12).view(2, 6)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    logits = model(input_ids=tokens).logits
    factors = [layer.output_factor for layer in model.modules() if isinstance(layer, FactoredLinear)]
    own = [factor for factor in factors if not isinstance(factor, Shared)]
    assert 0 < len(own) < len(factors)
    handles, copies = dict(model.state_dict()), {name: t.clone() for name, t in model.state_dict().items()}
    assert lay_out(model) == len(own)
    assert all(torch.equal(handles[name], copies[name]) for name in copies)  # what others hold is theirs
    assert all(factor.weight.stride() == (1, factor.weight.shape[0]) for factor in own)
    assert all(factor.weight.is_contiguous() for factor in factors if isinstance(factor, Shared))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    # the same sums of at most 56 terms in another order, through 2 blocks
    tolerance = 1e3 * torch.finfo(dtype).eps
    torch.testing.assert_close(model(input_ids=tokens).logits, logits, rtol=tolerance, atol=tolerance)
    assert lay_out(model) == 0
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert all(torch.equal(parameter, before[name]) for name, parameter in again.named_parameters())


def test_16_bits_stay_as_they_are() -> None:
    model = compressed(torch.bfloat16)
    assert lay_out(model) == 0
    assert all(parameter.is_contiguous() for parameter in model.parameters())
