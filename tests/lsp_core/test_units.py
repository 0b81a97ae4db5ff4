"""Discovery of units: families, every K/V routing, the meta device, exclusions, and each error."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lsp_core.discovery import discover_units
from lsp_core.units import LINEAR_TYPES, Unit, find_blocks, weight_of

COMMON = {"vocab_size": 61, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3}
LLAMA = LlamaConfig(**COMMON, intermediate_size=40)
QWEN3 = Qwen3Config(**COMMON | {"num_attention_heads": 4}, intermediate_size=40, num_key_value_heads=2, head_dim=10)
OPT = OPTConfig(**COMMON, ffn_dim=56, word_embed_proj_dim=24, max_position_embeddings=16)
GPT2 = GPT2Config(n_embd=24, n_head=3, n_layer=2, n_positions=16, vocab_size=61, bos_token_id=0, eos_token_id=0)
QKV = ("query", "key", "value")


def on_meta(config, **kwargs):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **kwargs)


def shape_of(unit, prefix):
    """A unit in short: member names without the prefix, side, dimension, other sides, roles."""
    members = "+".join(name.removeprefix(prefix) for name in unit.members)
    return members, unit.side, unit.dimension, unit.others, unit.roles


def first_block(units, prefix):
    return [shape_of(unit, f"{prefix}.0.") for unit in units if unit.block == 0]


LLAMA_MLP = [
    ("mlp.gate_proj+mlp.up_proj", "input", 24, (40, 40), ("", "")),
    ("mlp.down_proj", "output", 24, (40,), ("",)),
]


def test_llama():
    units = discover_units(on_meta(LLAMA))
    assert first_block(units, "model.layers") == [
        ("self_attn.q_proj+self_attn.k_proj+self_attn.v_proj", "input", 24, (24, 24, 24), QKV),
        ("self_attn.o_proj", "output", 24, (24,), ("",)),
        *LLAMA_MLP,
    ]
    assert [unit.block for unit in units] == [0] * 4 + [1] * 4
    assert units[0].name == "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    assert len({unit.name for unit in units}) == len(units)


def test_opt():
    assert first_block(discover_units(on_meta(OPT)), "model.decoder.layers") == [
        ("self_attn.q_proj+self_attn.k_proj+self_attn.v_proj", "input", 24, (24, 24, 24), QKV),
        ("self_attn.out_proj", "output", 24, (24,), ("",)),
        ("fc1", "input", 24, (56,), ("",)),
        ("fc2", "output", 24, (56,), ("",)),
    ]


def test_gpt2_conv1d_is_read_transposed():
    assert first_block(discover_units(on_meta(GPT2)), "transformer.h") == [
        ("attn.c_attn", "input", 24, (72,), ("query+key+value",)),
        ("attn.c_proj", "output", 24, (24,), ("",)),
        ("mlp.c_fc", "input", 24, (96,), ("",)),
        ("mlp.c_proj", "output", 24, (96,), ("",)),
    ]


# Q is 40 x 24, K and V are 20 x 24, the output projection 24 x 40
Q_ALONE = ("self_attn.q_proj", "input", 24, (40,), ("query",))
GROUPED = {
    "output": [Q_ALONE, ("self_attn.k_proj+self_attn.v_proj", "output", 20, (24, 24), ("key", "value"))],
    "input": [("self_attn.q_proj+self_attn.k_proj+self_attn.v_proj", "input", 24, (40, 20, 20), QKV)],
    "untied": [
        Q_ALONE,
        ("self_attn.k_proj", "output", 20, (24,), ("key",)),
        ("self_attn.v_proj", "output", 20, (24,), ("value",)),
    ],
}
GROUPED["auto"] = GROUPED["output"]


@pytest.mark.parametrize("kv_routing", GROUPED)
def test_narrower_keys_and_values(kv_routing):
    units = discover_units(on_meta(QWEN3), kv_routing=kv_routing)
    rest = [("self_attn.o_proj", "output", 24, (40,), ("",)), *LLAMA_MLP]
    assert first_block(units, "model.layers") == [*GROUPED[kv_routing], *rest]


EQUAL = {
    "auto": [("self_attn.q_proj+self_attn.k_proj+self_attn.v_proj", "input", 24, (24, 24, 24), QKV)],
    "output": [
        ("self_attn.q_proj", "output", 24, (24,), ("query",)),
        ("self_attn.k_proj+self_attn.v_proj", "output", 24, (24, 24), ("key", "value")),
    ],
    "untied": [(f"self_attn.{name[0]}_proj", "output", 24, (24,), (name,)) for name in QKV],
}
EQUAL["input"] = EQUAL["auto"]


@pytest.mark.parametrize("kv_routing", EQUAL)
def test_keys_and_values_as_wide_as_queries(kv_routing):
    units = discover_units(on_meta(LLAMA), kv_routing=kv_routing)
    assert first_block(units, "model.layers")[: len(EQUAL[kv_routing])] == EQUAL[kv_routing]


@pytest.mark.parametrize("config", [LLAMA, QWEN3, OPT, GPT2], ids=lambda config: config.model_type)
@pytest.mark.parametrize("tie", [True, False])
def test_every_linear_layer_of_the_blocks_is_in_one_unit(config, tie):
    model = on_meta(config)
    units = discover_units(model, tie=tie)
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, LINEAR_TYPES) and name != "lm_head"
    }
    members = [name for unit in units for name in unit.members]
    assert sorted(members) == sorted(layers)
    assert sum(unit.parameters for unit in units) == sum(layer.weight.numel() for layer in layers.values())
    assert all(len(unit.members) == 1 for unit in units) or tie
    for unit in units:
        for name, other in zip(unit.members, unit.others, strict=True):
            d_out, d_in = weight_of(layers[name]).shape
            assert (unit.dimension, other) == ((d_in, d_out) if unit.side == "input" else (d_out, d_in))


@pytest.mark.parametrize("config", [LLAMA, QWEN3, OPT, GPT2], ids=lambda config: config.model_type)
def test_meta_gives_what_a_real_frozen_model_gives(config):
    real = AutoModelForCausalLM.from_config(config).requires_grad_(False).train()
    before = {name: parameter.clone() for name, parameter in real.named_parameters()}
    assert discover_units(real) == discover_units(on_meta(config))
    assert real.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in real.modules())
    for name, parameter in real.named_parameters():
        assert torch.equal(parameter, before[name])
        assert not parameter.requires_grad


def test_a_layer_that_occurs_twice_is_one_unit():
    model = AutoModelForCausalLM.from_config(LLAMA)
    first, second = model.model.layers
    second.mlp.down_proj = first.mlp.down_proj
    down = [unit for unit in discover_units(model) if "down_proj" in unit.name]
    assert [unit.name for unit in down] == ["model.layers.0.mlp.down_proj"]


def test_excluded_layers_leave_their_ties():
    units = discover_units(on_meta(LLAMA), exclude=["*.v_proj", "*.0.mlp.*", "*.o_proj"])
    assert [unit.name.removeprefix("model.layers.") for unit in units] == [
        "0.self_attn.q_proj+k_proj",
        "1.self_attn.q_proj+k_proj",
        "1.mlp.gate_proj+up_proj",
        "1.mlp.down_proj",
    ]


def test_exclude_that_matches_nothing():
    with pytest.raises(ValueError, match=r"'\*\.w_proj' matches no linear layer"):
        discover_units(on_meta(LLAMA), exclude=["*.q_proj", "*.w_proj"])


def test_exclude_that_matches_everything():
    with pytest.raises(ValueError, match="no targetable layer"):
        discover_units(on_meta(LLAMA), exclude=["*"])


def test_input_tie_contradicts_no_ties():
    with pytest.raises(ValueError, match=r"kv_routing='input'.*tie=false"):
        discover_units(on_meta(LLAMA), kv_routing="input", tie=False)


def test_output_tie_needs_both_keys_and_values():
    with pytest.raises(ValueError, match="needs one key and one value"):
        discover_units(on_meta(LLAMA), kv_routing="output", exclude=["*.v_proj"])


@pytest.mark.parametrize("config", [LLAMA, QWEN3, OPT, GPT2], ids=lambda config: config.model_type)
def test_attention_that_is_not_fused_gives_the_same_units(config):
    assert discover_units(on_meta(config, attn_implementation="eager")) == discover_units(on_meta(config))


class _OpaqueAttention(torch.autograd.Function):
    """An attention that no trace sees through."""

    @staticmethod
    def forward(ctx, query, key, value):
        return query.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def test_attention_that_cannot_be_traced(monkeypatch):
    def opaque(module, query, key, value, *_, **__):
        return _OpaqueAttention.apply(query, key, value).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "opaque", opaque)
    model = on_meta(QWEN3, attn_implementation="opaque")
    with pytest.raises(ValueError, match=r"cannot tell.*explicit groups"):
        discover_units(model)
    units = discover_units(model, kv_routing="input")
    assert first_block(units, "model.layers")[0] == (*GROUPED["input"][0][:-1], ("", "", ""))


def test_a_model_without_blocks():
    with pytest.raises(ValueError, match="Sequential has no repeated blocks"):
        find_blocks(nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])))


@pytest.mark.parametrize("others", [(7,), (13,), (40,), (7, 9), (13, 13, 13), (40, 40)])
def test_savings_are_those_of_explicit_factors(others):
    unit = Unit(
        name="u", side="input", members=tuple("abc"[: len(others)]), dimension=13, others=others, block=0, roles=()
    )
    assert unit.saved(0) == 0
    for removed in range(1, 13):
        shared = torch.empty(13 - removed, 13)
        own = [torch.empty(other, 13 - removed) for other in others]
        assert unit.saved(removed) == unit.parameters - shared.numel() - sum(factor.numel() for factor in own)
    assert unit.break_even == min(k for k in range(1, 14) if unit.saved(k) > 0)
