"""Analytic figures: the paper's rows to the printed digit, and real parameters and counted FLOPs on tiny models."""

import copy
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Qwen3Config,
)

from lsp_core.allocation import uniform_parameters
from lsp_core.discovery import discover_units
from lsp_core.efficiency import efficiency, fused_members
from lsp_core.merging import merge_model, removed_directions

GIB = 2**30
CONTEXT = 2048
FAMILIES = ["llama", "opt", "gpt2", "qwen3"]


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def llama_2_7b():
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        tie_word_embeddings=False,
    )
    model = on_meta(config)
    return model, discover_units(model)


def printed(figures):
    return (
        f"{figures.weights_gib:.2f}",
        f"{figures.kv_floats_per_token_per_layer:.0f}",
        f"{figures.weights_plus_kv_128k_gib:.1f}",
        f"{figures.max_context_k_tokens:.1f}",
        f"{figures.prefill_tflop_2k:.2f}",
        f"{figures.decode_gflop_2k:.2f}",
    )


# The paper prints weights plus cache at 128k for other ranks than these; that column follows from the two before it.
PAPER = {
    None: ("12.55", "8192", "524.6", "19.7", "29.26", "14.29"),
    0.3: ("8.93", "1673", "113.5", "101.0", "21.30", "10.40"),
    0.5: ("6.52", "1195", "81.2", "145.6", "16.00", "7.81"),
    0.7: ("4.11", "717", "48.9", "249.8", "10.69", "5.22"),
}


@pytest.mark.parametrize("ratio", PAPER)
def test_reproduces_the_uniform_rows_of_the_paper(llama_2_7b, ratio):
    model, units = llama_2_7b
    removed = uniform_parameters(units, ratio).removed if ratio else {}
    assert printed(efficiency(model, units, removed)) == PAPER[ratio]


def merged(case):
    """The model with 60 % of every unit's directions gone, the untrained ones."""
    vectors = {name: removed_directions(case.bases[name], k) for name, k in case.removed.items()}
    merge_model(case.model, case.units, vectors)
    return case.model


def real_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_real_model(prepare, family):
    case = prepare(family)
    dense = efficiency(case.model, case.units, {})
    compressed = efficiency(case.model, case.units, case.removed)
    assert dense.parameters == real_parameters(case.model)
    assert compressed.parameters == real_parameters(merged(case))
    assert compressed.weights_gib == 2 * compressed.parameters / GIB


def counted_flops(model):
    """FLOPs of the matrix products of a 2k prefill, on fake tensors, less those that make rotary angles."""
    model = copy.deepcopy(model).to("meta")
    model.set_attn_implementation("eager")
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, CONTEXT, dtype=torch.long, device="meta"), use_cache=False)
    rotary = sum(
        sum(flops.values()) for name, flops in counter.get_flop_counts().items() if name.endswith("rotary_emb")
    )
    return counter.get_total_flops() - rotary


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_of_the_matrix_products(prepare, family):
    case = prepare(family)
    dense = efficiency(case.model, case.units, {})
    compressed = efficiency(case.model, case.units, case.removed)
    assert dense.prefill_tflop_2k == pytest.approx(counted_flops(case.model) / 1e12, rel=1e-12)
    assert compressed.prefill_tflop_2k == pytest.approx(counted_flops(merged(case)) / 1e12, rel=1e-12)
    for figures in (dense, compressed):
        assert figures.decode_gflop_2k * 1e9 * CONTEXT == pytest.approx(figures.prefill_tflop_2k * 1e12, rel=1e-12)


QWEN3 = Qwen3Config(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
)


@pytest.mark.parametrize(
    ("kv_routing", "removed", "expected"),
    [
        ("auto", {"k_proj+v_proj": 13}, 7 + 7),  # one projector, a latent for each of K and V
        ("output", {"k_proj+v_proj": 13}, 7 + 7),
        ("untied", {"k_proj": 13, "v_proj": 4}, 7 + 16),
        ("untied", {"k_proj": 13}, 7 + 20),  # V stays dense, at full width
        ("input", {"q_proj+k_proj+v_proj": 15}, 9),  # one latent for both
        ("auto", {"q_proj": 13, "o_proj": 13, "gate_proj+up_proj": 13, "down_proj": 13}, 40),  # feed no cache
    ],
)
def test_cache_of_grouped_query_attention(kv_routing, removed, expected):
    model = on_meta(QWEN3)
    units = discover_units(model, kv_routing=kv_routing)
    assert efficiency(model, units, {}).kv_floats_per_token_per_layer == 2 * 2 * 10
    both = {unit.name: removed.get(unit.name.rpartition(".")[2], 0) for unit in units}
    assert efficiency(model, units, both).kv_floats_per_token_per_layer == expected
    first = {unit.name: both[unit.name] for unit in units if unit.block == 0}
    assert efficiency(model, units, first).kv_floats_per_token_per_layer == (expected + 40) / 2


def test_fused_queries_keys_and_values_cache_one_latent(prepare):
    case = prepare("gpt2")
    fused = {unit.name: 30 for unit in case.units if unit.name.endswith("c_attn")}
    assert efficiency(case.model, case.units, {}).kv_floats_per_token_per_layer == 2 * 48
    assert efficiency(case.model, case.units, fused).kv_floats_per_token_per_layer == 48 - 30


def test_fused_members_are_told(prepare):
    case = prepare("gpt2")
    names = [unit.name for unit in case.units if unit.name.endswith("c_attn")]
    assert fused_members(case.units, dict.fromkeys(names, 30)) == names
    assert fused_members(case.units, {}) == []
    assert fused_members(prepare("llama").units, {unit.name: 1 for unit in prepare("llama").units}) == []


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


def test_a_token_is_counted_in_the_experts_that_it_is_routed_to():
    model = on_meta(MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2))
    linear = 2 * (4 * 32 * 32 + 8 * 32 + 2 * 3 * 32 * 64) + 100 * 32  # of 2 blocks, and the head
    expected = 2 * linear + 4 * CONTEXT * 32 * 2
    figures = efficiency(model, [], {})
    assert figures.decode_gflop_2k == pytest.approx(expected / 1e9, rel=1e-12)
    assert figures.parameters == real_parameters(model)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100), "layers without attention"),
        (
            DeepseekV3Config(
                **SMALL,
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_rope_head_dim=4,
                qk_nope_head_dim=4,
                v_head_dim=4,
                first_k_dense_replace=2,
            ),
            "multi-head latent attention",
        ),
    ],
)
def test_what_keeps_no_keys_and_values_is_refused(config, words):
    with pytest.raises(ValueError, match=words):
        efficiency(on_meta(config), [], {})


def test_excluded_keys_are_cached_at_full_width():
    model = on_meta(QWEN3)
    units = discover_units(model, kv_routing="untied", exclude=["*.k_proj"])
    removed = {unit.name: 13 for unit in units if unit.name.endswith("v_proj")}
    assert efficiency(model, units, removed).kv_floats_per_token_per_layer == 20 + 7


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_the_longest_context_fills_the_device(llama_2_7b, ratio):
    model, units = llama_2_7b
    removed = uniform_parameters(units, ratio).removed if ratio else {}
    figures = efficiency(model, units, removed, device_gib=40)
    cached = figures.kv_floats_per_token_per_layer * 32 * 2 * 8 / GIB  # GiB a token of each of 8 sequences
    assert figures.weights_gib + 6 + cached * figures.max_context_k_tokens * 1000 == pytest.approx(40, rel=1e-12)
    assert figures.weights_plus_kv_128k_gib == pytest.approx(figures.weights_gib + cached * 131072, rel=1e-12)


def test_no_context_fits_beside_weights_that_do_not(llama_2_7b):
    model, units = llama_2_7b
    assert efficiency(model, units, {}, device_gib=18.5).max_context_k_tokens == 0


def test_unknown_roles_are_an_error_not_a_guess():
    """Where a trace saw no attention, it cannot tell which layers feed the cache."""
    model = on_meta(Gemma2Config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2))
    units = [replace(unit, roles=("",) * len(unit.members)) for unit in discover_units(model, kv_routing="input")]
    assert efficiency(model, units, {}).kv_floats_per_token_per_layer > 0
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        efficiency(model, units, {units[0].name: 5})
