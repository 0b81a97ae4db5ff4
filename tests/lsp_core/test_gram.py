"""Grams against a double loop over layers and tokens."""

import pytest
import torch

from lsp_core.gram import NonFiniteError, gather_grams
from lsp_core.units import weight_of

EPS = torch.finfo(torch.float64).eps


def oracle(case, ids):
    """Each unit's Gram from activations recorded one sequence at a time, outer product by outer product."""
    seen = {name: [] for unit in case.units for name in unit.members}
    handles = [
        case.model.get_submodule(name).register_forward_hook(lambda _, args, __, name=name: seen[name].append(args[0]))
        for name in seen
    ]
    with torch.no_grad():
        for row in ids:
            case.model(input_ids=row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    grams = {}
    for unit in case.units:
        gram = torch.zeros(unit.dimension, unit.dimension, dtype=torch.float64)
        for name in unit.members[: 1 if unit.side == "input" else None]:
            for x in torch.cat([part.reshape(-1, part.shape[-1]) for part in seen[name]]):
                v = x if unit.side == "input" else weight_of(case.model.get_submodule(name)) @ x  # no bias
                gram += torch.outer(v.detach(), v.detach())
        grams[unit.name] = gram
    return grams


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "qwen3"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_is_the_sum_of_outer_products(prepare, family, micro_batch):
    case = prepare(family)
    ids = case.tokens[:5, :7]
    grams = gather_grams(case.model, case.units, ids, micro_batch=micro_batch)
    for name, expected in oracle(case, ids).items():
        # 35 tokens, behind a forward pass of a few dozen roundings
        assert (grams[name] - expected).abs().max() <= 1e4 * EPS * expected.abs().max(), name


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_leaves_padding_out(prepare, family, side):
    case = prepare(family)
    short, long = case.tokens[0, :4], case.tokens[1, :9]
    padding = torch.ones(5, dtype=torch.long)
    padded = torch.stack([torch.cat([padding, short] if side == "left" else [short, padding]), long])
    grams = gather_grams(case.model, case.units, padded, micro_batch=2, padding_id=1)
    alone = [gather_grams(case.model, case.units, ids[None], micro_batch=1) for ids in (short, long)]
    for name, gram in grams.items():
        expected = alone[0][name] + alone[1][name]
        # a rotary position shifts by the padding, which float32 sines and cosines see
        assert (gram - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_precision_is_the_accumulator(prepare):
    case = prepare("llama")
    single = gather_grams(case.model, case.units, case.tokens, micro_batch=3, precision=torch.float32)
    for name, gram in case.grams.items():
        assert single[name].dtype == torch.float32
        error = (single[name] - gram).abs().max() / gram.abs().max()
        assert 0 < error <= case.tokens.numel() * torch.finfo(torch.float32).eps


def test_leaves_nothing_behind(prepare):
    case = prepare("llama")
    case.model.train()
    steps = []
    gather_grams(
        case.model, case.units, case.tokens, micro_batch=4, progress=lambda done, all_: steps.append((done, all_))
    )
    assert steps == [(4, 6), (6, 6)]
    assert case.model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_names_the_layer_that_is_not_finite(prepare, bad):
    case = prepare("llama")
    with torch.no_grad():
        case.model.get_submodule("model.layers.1.mlp.up_proj").weight[3, 5] = bad
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.down_proj"):
        gather_grams(case.model, case.units, case.tokens, micro_batch=4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.model.modules())
