"""Random models have the shapes, the sharing and the bytes that they are measured for."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, OPTConfig, PreTrainedConfig, Qwen3Config

from lsp_core.allocation import UnreachableRatio
from lsp_core.discovery import discover_units
from lsp_core.modeling_lsp import FactoredLinear
from lsp_core.named_shapes import SHAPES, config_of
from lsp_core.random_models import (
    Pair,
    Pool,
    bytes_read,
    dense_model,
    described_units,
    materialize,
    parameter_count,
    pooled_shapes,
    realized_ratio,
    tied_model,
    untied_model,
)

HIDDEN, BLOCKS, VOCABULARY = 24, 3, 37
LLAMA = LlamaConfig(
    hidden_size=HIDDEN,
    intermediate_size=56,
    num_hidden_layers=BLOCKS,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=VOCABULARY,
)
QWEN = Qwen3Config(
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_hidden_layers=BLOCKS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    vocab_size=VOCABULARY,
    tie_word_embeddings=True,
)
OPT = OPTConfig(
    hidden_size=HIDDEN,
    ffn_dim=40,
    num_hidden_layers=BLOCKS,
    num_attention_heads=4,
    word_embed_proj_dim=HIDDEN,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
)


def linear(rows: int, columns: int, *, bias: bool = False) -> int:
    return rows * columns + (rows if bias else 0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_read_are_those_of_a_count_by_hand(batch: int, dtype: torch.dtype) -> None:
    head = linear(VOCABULARY, HIDDEN)
    llama = BLOCKS * (4 * linear(24, 24) + 3 * linear(56, 24) + 2 * 24) + 24 + head + batch * 24
    qwen = BLOCKS * (linear(40, 24) + 2 * linear(20, 24) + linear(24, 40) + 3 * linear(40, 24) + 2 * 24 + 2 * 10)
    qwen += 24 + head  # the table of embeddings is the head: read whole, its rows not once more
    opt = BLOCKS * (4 * linear(24, 24, bias=True) + linear(40, 24, bias=True) + linear(24, 40, bias=True) + 4 * 24)
    opt += 2 * 24 + head + batch * 24  # its table is the head too, its positions are a row for each sequence
    for config, expected in ((LLAMA, llama), (QWEN, qwen), (OPT, opt)):
        model = dense_model(config).to(dtype)
        assert bytes_read(model, batch) == expected * dtype.itemsize, type(model).__name__


@pytest.mark.parametrize("config", [LLAMA, QWEN, OPT])
def test_bytes_saved_are_those_of_the_units(config: PreTrainedConfig) -> None:
    dense, described = dense_model(config), described_units(config, 0.5)
    ranks = {unit["name"]: unit["rank"] for unit in described}
    saved = sum(u.saved(u.dimension - ranks[u.name]) for u in discover_units(dense) if u.name in ranks)
    assert bytes_read(dense, 2) - bytes_read(tied_model(config, described), 2) == 4 * saved


@pytest.mark.parametrize("config", [LLAMA, QWEN, OPT])
@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_tied_and_untied_realize_the_same_ratio(config: PreTrainedConfig, ratio: float) -> None:
    dense, tied = dense_model(config), tied_model(config, described_units(config, ratio))
    realized = realized_ratio(dense, tied)
    pairs, ranks = untied_model(config, realized)
    layers = {name: module for name, module in pairs.named_modules() if isinstance(module, Pair)}
    assert {name: layer.input_factor.weight.shape[0] for name, layer in layers.items()} == ranks
    assert len({id(p) for p in pairs.parameters()}) == len(list(pairs.named_parameters(remove_duplicate=False))) - (
        1 if config.tie_word_embeddings else 0
    ), "factors of untied pairs are shared"
    targeted = [m for m in dense.modules() if isinstance(m, nn.Linear) and m is not dense.get_output_embeddings()]
    total = sum(m.weight.numel() for m in targeted)
    # a rank is rounded by a half at most, and costs what a row and a column of its layers' weights have
    coarse = sum(0.5 * (m.in_features + m.out_features) for m in targeted) / total
    assert abs(realized - ratio) <= coarse
    assert abs(realized_ratio(dense, pairs) - realized) <= coarse
    assert realized == (parameter_count(dense) - parameter_count(tied)) / total


def test_materialized_weights_are_finite_normal_and_shared_as_before() -> None:
    config, dtype = QWEN, torch.float32
    dense, tied = dense_model(config), tied_model(config, described_units(config, 0.6))
    size = max(Pool.bytes_for(pooled_shapes(model), dtype) for model in (dense, tied))
    pool = Pool(size, dtype, "cpu")
    names = {name: id(p) for name, p in tied.named_parameters(remove_duplicate=False)}
    for model in (dense, tied):
        materialize(model, pool, dtype, "cpu")
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name
            tiny = torch.finfo(dtype).tiny
            assert ((parameter == 0) | (parameter.abs() >= tiny)).all(), name
            assert parameter.dim() == 1 or parameter.std() > 0.01, name
    after = {name: id(p) for name, p in tied.named_parameters(remove_duplicate=False)}
    pairs = [(a, b) for a in names for b in names]
    assert all((names[a] == names[b]) == (after[a] == after[b]) for a, b in pairs)
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    expected = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 10, 2) / 10)
    torch.testing.assert_close(dense.model.rotary_emb.inv_freq, expected)
    starts = sorted((p.data_ptr(), p.numel() * 4) for p in dense.parameters() if p.dim() > 1)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(starts)), "weights overlap"


@torch.no_grad()
def test_a_pair_is_the_product_of_its_factors() -> None:
    layer = nn.Linear(7, 5, dtype=torch.float64)
    pair = Pair(layer, 3).double()
    x = torch.randn(2, 7, dtype=torch.float64)
    product = pair.output_factor.weight @ pair.input_factor.weight
    torch.testing.assert_close(pair(x), x @ product.T + pair.output_factor.bias)
    assert Pair(nn.Linear(7, 5, bias=False), 3).output_factor.bias is None


def test_named_shapes_have_the_published_sizes() -> None:
    billions = {"llama-810m": 0.826, "llama-2-7b": 6.738, "llama-2-13b": 13.016, "qwen3-4b": 4.022, "opt-125m": 0.125}
    assert billions.keys() == SHAPES.keys()
    for name, size in billions.items():
        assert round(parameter_count(dense_model(config_of(name))) / 1e9, 3) == size, name


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for name, text, words in (
        ("nonesuch", None, "the shapes are llama-810m"),
        ("gone.json", None, "cannot be read"),
        ("bad.json", "{", "is not JSON"),
        ("list.json", "[]", "has no model_type"),
        ("odd.json", '{"model_type": "nonesuch"}', "nonesuch"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            config_of(str(tmp_path / name) if name.endswith(".json") else name)
    (tmp_path / "vit.json").write_text('{"model_type": "vit"}')
    picture = config_of(str(tmp_path / "vit.json"))
    with pytest.raises(ValueError, match="no causal language model"):
        dense_model(picture)
    with pytest.raises(UnreachableRatio):
        described_units(LLAMA, 0.999)


def test_a_compressed_layer_is_one_of_the_products() -> None:
    model = tied_model(LLAMA, described_units(LLAMA, 0.5))
    attention = model.model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, FactoredLinear)
    assert attention.q_proj.input_factor is attention.k_proj.input_factor
