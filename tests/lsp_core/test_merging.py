"""Merging against the projected model and against dense projectors."""

import pytest
import torch

from lsp_core.merging import merge_model, removed_directions
from lsp_core.modeling_lsp import FactoredLinear, Shared
from lsp_core.units import weight_of

FAMILIES = ["llama", "opt", "gpt2", "qwen3"]  # input and output ties, biases, Conv1D


def dense_weights(case, oracles, vectors):
    """W P or P W of every member, (D_out, D_in), in float64."""
    weights = {}
    for unit in case.units:
        if unit.name in vectors:
            (p,) = oracles.explicit_projectors(vectors[unit.name], torch.ones(1, vectors[unit.name].shape[1]), 1.0)
            for name in unit.members:
                w = weight_of(case.model.get_submodule(name)).detach()
                weights[name] = w @ p if unit.side == "input" else p @ w
    return weights


def product(layer: FactoredLinear) -> torch.Tensor:
    return layer.output_factor.weight @ layer.input_factor.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_equals_projected(prepare, oracles, family):
    """Weights and logits; V neither orthonormal nor of unit length."""
    case = prepare(family)
    vectors = case.perturbed()
    expected = oracles.logits(case, vectors, oracles.all_removed(case), 1.0)
    weights = dense_weights(case, oracles, vectors)
    biases = {name: case.model.get_submodule(name).bias for name in weights}
    dense = case.logits()
    report = merge_model(case.model, case.units, vectors)
    merged = case.logits()
    assert (merged - expected).abs().max() <= 1e-12 * expected.abs().max()  # a few blocks of float64 rounding
    assert (merged - dense).abs().max() > 1e-3  # something was removed
    for name, weight in weights.items():
        layer = case.model.get_submodule(name)
        assert isinstance(layer, FactoredLinear)
        assert (product(layer) - weight).abs().max() <= 1e-13 * weight.abs().max()
        assert layer.bias is None if biases[name] is None else torch.equal(layer.bias, biases[name])
    assert report.keys() == vectors.keys()
    for unit in case.units:
        assert report[unit.name].rank == unit.dimension - case.removed[unit.name]
        assert report[unit.name].error <= 1e-13
        assert report[unit.name].dropped == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_parameters_are_the_stored_ones(prepare, family):
    case = prepare(family)
    before = sum(p.numel() for p in case.model.parameters())
    merge_model(case.model, case.units, case.perturbed())
    for unit in case.units:
        layers = [case.model.get_submodule(name) for name in unit.members]
        factors = {id(p): p.numel() for layer in layers for n, p in layer.named_parameters() if "bias" not in n}
        assert sum(factors.values()) == unit.factor_parameters(unit.dimension - case.removed[unit.name])
    saved = sum(unit.saved(case.removed[unit.name]) for unit in case.units)
    assert sum(p.numel() for p in case.model.parameters()) == before - saved


def test_tied_factor_is_one_module_on_the_tied_side(prepare):
    case = prepare("llama")
    tied = next(u for u in case.units if len(u.members) == 3)
    merge_model(case.model, case.units, case.perturbed())
    layers = [case.model.get_submodule(name) for name in tied.members]
    assert len({id(layer.input_factor) for layer in layers}) == 1
    assert len({id(layer.output_factor) for layer in layers}) == 3
    assert layers[0].input_factor._once.readers == 3


def test_output_tied_factor_is_one_module(prepare):
    case = prepare("qwen3")
    tied = next(u for u in case.units if u.side == "output" and len(u.members) == 2)
    merge_model(case.model, case.units, case.perturbed())
    layers = [case.model.get_submodule(name) for name in tied.members]
    assert len({id(layer.output_factor) for layer in layers}) == 1
    assert len({id(layer.input_factor) for layer in layers}) == 2
    assert not any(isinstance(layer.input_factor, Shared) for layer in layers)


def test_shared_factor_is_the_bare_basis(prepare):
    """A = U_perpT or B = U_perp has orthonormal rows or columns, orthogonal to V."""
    case = prepare("qwen3")
    vectors = case.perturbed()
    merge_model(case.model, case.units, vectors)
    for unit in case.units:
        layer = case.model.get_submodule(unit.members[0])
        basis = layer.input_factor.weight.T if unit.side == "input" else layer.output_factor.weight
        assert (basis.T @ basis - torch.eye(layer.ranks[unit.side], dtype=torch.float64)).abs().max() <= 1e-13
        assert (basis.T @ vectors[unit.name]).abs().max() <= 1e-13


@pytest.mark.parametrize(("dtype", "roundoff"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-9)])
def test_narrow_factors_are_rounded_once(prepare, oracles, make_model, dtype, roundoff):
    """The factors are made in float64 and rounded to the weights' type at the end."""
    case = prepare("qwen3")
    case.model = make_model("qwen3", dtype)
    vectors = {name: v.float() for name, v in case.perturbed().items()}
    exact = {n: v.double() for n, v in vectors.items()}
    double = prepare("qwen3")
    double.model.load_state_dict(case.model.state_dict())
    weights = dense_weights(double, oracles, exact)
    merge_model(case.model, case.units, vectors)
    for name, weight in weights.items():
        layer = case.model.get_submodule(name)
        a, b = layer.input_factor.weight.double(), layer.output_factor.weight.double()
        assert layer.input_factor.weight.dtype == dtype
        bound = 3 * roundoff * (b.abs() @ a.abs())  # each factor rounded once, and their product of roundings
        assert ((b @ a - weight).abs() <= bound).all(), name


def test_units_without_vectors_stay_dense(prepare):
    case = prepare("llama")
    chosen = case.units[1].name
    before = {n: m for n, m in case.model.named_modules() if n not in case.by_name[chosen].members}
    report = merge_model(case.model, case.units, {chosen: case.perturbed()[chosen]})
    assert list(report) == [chosen]
    factored = [name for name, module in case.model.named_modules() if isinstance(module, FactoredLinear)]
    assert factored == list(case.by_name[chosen].members)
    after = dict(case.model.named_modules())
    assert all(after[name] is module for name, module in before.items())


@pytest.mark.parametrize("k", [1, 47])
def test_fewest_and_most_directions(prepare, oracles, k):
    case = prepare("llama")
    vectors = {unit.name: case.bases[unit.name][:, 48 - k :] for unit in case.units}
    weights = dense_weights(case, oracles, vectors)
    merge_model(case.model, case.units, vectors)
    for name, weight in weights.items():
        assert (product(case.model.get_submodule(name)) - weight).abs().max() <= 1e-13 * weight.abs().max().clamp_min(1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tolerance_drops_singular_values_and_says_so(prepare, oracles, family):
    """Against the best approximation of the stacked projected weight, by its own SVD."""
    case = prepare(family)
    vectors = case.perturbed()
    stacks = {}
    weights = dense_weights(case, oracles, vectors)
    originals = {name: weight_of(case.model.get_submodule(name)).detach() for name in weights}
    for unit in case.units:
        parts = [weights[name] for name in unit.members]
        stacks[unit.name] = torch.cat(parts, 0 if unit.side == "input" else 1)
    tolerance = 1.0
    report = merge_model(case.model, case.units, vectors, tolerance=tolerance)
    narrowed = 0
    for unit in case.units:
        left, singular, right = torch.linalg.svd(stacks[unit.name], full_matrices=False)
        kept = singular > tolerance
        narrowed += int(kept.sum()) < unit.dimension - case.removed[unit.name]
        assert report[unit.name].rank == int(kept.sum())
        dropped = singular[~kept].norm() / singular.norm()
        assert report[unit.name].dropped == pytest.approx(dropped.item(), rel=1e-9, abs=1e-12)
        best = left[:, kept] * singular[kept] @ right[kept]
        layers = [case.model.get_submodule(name) for name in unit.members]
        ours = torch.cat([product(layer) for layer in layers], 0 if unit.side == "input" else 1)
        assert (ours - best).abs().max() <= 1e-10  # singular vectors next to a gap
        largest = max(originals[name].abs().max() for name in unit.members)
        error = (ours - stacks[unit.name]).abs().max() / largest
        assert report[unit.name].error == pytest.approx(error.item(), rel=1e-6, abs=1e-12)
    assert narrowed > 0


def test_untrained_merge_is_the_last_columns(prepare):
    case = prepare("llama")
    q = case.bases[case.units[0].name]
    assert torch.equal(removed_directions(q, 5), q[:, 43:])
    assert removed_directions(q, 0).shape == (48, 0)


def test_merged_model_holds_no_trainable_factor(prepare):
    case = prepare("llama")
    merge_model(case.model, case.units, case.perturbed())
    factors = [m for m in case.model.modules() if isinstance(m, FactoredLinear)]
    assert factors
    assert not any(p.requires_grad for factor in factors for p in factor.parameters())
