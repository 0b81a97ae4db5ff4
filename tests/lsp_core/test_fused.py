"""Models whose groups are computed by one op: the same numbers, one call a group, and the latent cache beside it."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from lsp_core import fused
from lsp_core.fused import fuse, pad_ranks
from lsp_core.merging import merge_model
from lsp_core.modeling import compressed
from lsp_core.modeling_lsp import FactoredLinear
from lsp_core.random_models import Pool, materialize, pooled_shapes, untied_model


@pytest.fixture
def make(prepare):
    """Makes a compressed model of a family, in float64, and its tokens."""

    def merged(family):
        case = prepare(family)
        merge_model(case.model, case.units, case.perturbed())
        return compressed(case.model, case.units), case.tokens

    return merged


@pytest.fixture
def calls(monkeypatch):
    made = []
    plain = fused.low_rank_linear

    def counted(x, a, bs, biases):
        made.append(len(bs))
        return plain(x, a, bs, biases)

    monkeypatch.setattr(fused, "low_rank_linear", counted)
    return made


@pytest.mark.parametrize(("family", "members"), [("llama", [3, 1, 2, 1]), ("qwen3", [1, 1, 1, 1, 2, 1]), ("opt", None)])
@torch.no_grad()
def test_gives_the_same_logits_with_one_call_a_group(make, calls, family, members):
    model, tokens = make(family)
    expected = model(input_ids=tokens).logits
    assert calls == []
    groups = fuse(model)
    logits = model(input_ids=tokens).logits
    assert len(calls) == groups
    assert sum(calls) == sum(isinstance(module, FactoredLinear) for module in model.modules())
    if members is not None:
        assert calls == members * (groups // len(members))
    # the same products: what differs is where a shared factor's bias is added
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_ranks_are_rounded_up_by_zeros(make, calls, family):
    """Shared factors on either side; once more changes nothing; the logits stay, fused or not."""
    model, tokens = make(family)
    expected = model(input_ids=tokens).logits
    layers = [module for module in model.modules() if isinstance(module, FactoredLinear)]
    before = [set(layer.ranks.values()) for layer in layers]
    assert any(rank % 16 for ranks in before for rank in ranks)
    assert pad_ranks(model) > 0
    assert pad_ranks(model) == 0
    for layer, (rank,) in zip(layers, before, strict=True):
        assert set(layer.ranks.values()) == {-(-rank // 16) * 16}
    for fused_too in (False, True):
        if fused_too:
            fuse(model)
        logits = model(input_ids=tokens).logits
        assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert calls


@torch.no_grad()
def test_untied_pairs_are_padded_and_fused_likewise(calls):
    shape = {"hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    model, ranks = untied_model(LlamaConfig(**shape, vocab_size=37), 0.5)
    pool = Pool(Pool.bytes_for(pooled_shapes(model), torch.float64), torch.float64, "cpu", scale=0.2)
    materialize(model, pool, torch.float64, "cpu")
    tokens = torch.arange(12).view(2, 6)
    expected = model(input_ids=tokens).logits
    assert any(rank % 16 for rank in ranks.values())
    assert pad_ranks(model) > 0
    layers = [module for module in model.modules() if isinstance(module, FactoredLinear)]
    assert not any(rank % 16 for layer in layers for rank in layer.ranks.values())
    assert fuse(model) == len(ranks) == len(layers)
    assert (model(input_ids=tokens).logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert calls == [1] * len(ranks)


def test_names_of_the_parameters_stay(make):
    model, _ = make("llama")
    names = list(model.state_dict())
    fuse(model)
    assert list(model.state_dict()) == names


@torch.no_grad()
def test_a_copy_computes_with_its_own_weights(make):
    model, tokens = make("llama")
    fuse(model)
    expected = model(input_ids=tokens).logits
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(other(input_ids=tokens).logits, expected)


@torch.no_grad()
def test_the_latents_of_keys_and_values_stay_where_a_cache_reads_them(make, calls):
    model, tokens = make("llama")
    groups = fuse(copy.deepcopy(model))
    fuse(model)
    assert 0 < fuse(model, latent_cache=True) < groups  # whatever was fused before
    model(input_ids=tokens)
    assert 2 in calls  # gate and up
    assert 3 not in calls


def test_replaced_factors_are_left_alone(make, calls):
    model, tokens = make("llama")
    layer = model.model.model.layers[0].mlp.down_proj

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer.output_factor.__class__ = Doubled
    expected = model(input_ids=tokens).logits
    fuse(model)
    assert layer.fused is None
    layer.output_factor.__class__ = torch.nn.Linear
    fuse(model)
    layer.output_factor.__class__ = Doubled
    with pytest.raises(RuntimeError, match="fuse last"):
        model(input_ids=tokens)
    fuse(model)
    assert (model(input_ids=tokens).logits - expected).abs().max() <= 1e-12 * expected.abs().max()
