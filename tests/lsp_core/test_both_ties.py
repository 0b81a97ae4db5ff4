"""Layers tied on their input and on their output: merging, storing and loading P_out W P_in = B C A."""

import copy
import json
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lsp_core.merging import merge_model, merged_parameters, outputs_of, projected_outputs
from lsp_core.modeling import WEIGHTS, load_compressed, save_compressed
from lsp_core.modeling_lsp import FactoredLinear, Shared
from lsp_core.units import Unit, weight_of

FAMILIES = ["opt", "qwen3"]  # biases; keys and values narrower than queries, without biases
LAYOUTS = {  # members of the input units and of the output units, by the letters of the layers
    "paper": (["qkv"], ["kv"]),
    "chain": (["qk"], ["kv"]),  # v on its output alone
    "single": (["v"], ["v", "k"]),
    "two": (["qv", "k"], ["kv"]),  # three units that belong together
}


@dataclass
class Doubly:
    """A model whose attention is in units of both sides, and a random V for each."""

    model: torch.nn.Module
    units: list[Unit]
    vectors: dict[str, Tensor]
    tokens: Tensor

    @property
    def ranks(self) -> dict[str, int]:
        return {unit.name: unit.dimension - self.vectors[unit.name].shape[1] for unit in self.units}

    def weights(self) -> dict[str, Tensor]:
        """P_out W P_in of every member with dense projectors, float64."""
        weights: dict[str, Tensor] = {}
        for unit in self.units:
            v = self.vectors[unit.name].double()
            p = torch.eye(len(v), dtype=v.dtype) - v @ torch.linalg.inv(v.T @ v) @ v.T
            for name in unit.members:
                w = weights.get(name, weight_of(self.model.get_submodule(name)).detach().double())
                weights[name] = w @ p if unit.side == "input" else p @ w
        return weights


@pytest.fixture
def double(prepare, make_model):
    """Builds a model and its units; input units lose 20 of 48 dimensions, output units 21 of 48 or 10 of 24."""

    def build(family="opt", layout="paper", dtype=torch.float64):
        case = prepare(family)
        model = make_model(family, dtype)
        blocks = sorted({name.rpartition(".")[0] for unit in case.units for name in unit.members if "_attn" in name})
        units = []
        for index, block in enumerate(blocks):
            for side, groups in zip(("input", "output"), LAYOUTS[layout], strict=True):
                for letters in groups:
                    members = tuple(f"{block}.{letter}_proj" for letter in letters)
                    shapes = [weight_of(model.get_submodule(name)).shape for name in members]
                    projected, other = (1, 0) if side == "input" else (0, 1)
                    unit = Unit(
                        name=f"{block}.{letters}.{side}",
                        side=side,
                        members=members,
                        dimension=shapes[0][projected],
                        others=tuple(shape[other] for shape in shapes),
                        block=index,
                        roles=("",) * len(members),
                    )
                    units.append(unit)
        torch.manual_seed(3)
        vectors = {}
        for unit in units:
            count = 20 if unit.side == "input" else {48: 21, 24: 10}[unit.dimension]
            vectors[unit.name] = torch.randn(unit.dimension, count, dtype=torch.float64)
        return Doubly(model, units, vectors, case.tokens)

    return build


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_equals_dense_and_projected(double, family, layout):
    case = double(family, layout)
    weights = case.weights()
    parameters = {f"{name}.weight": weight for name, weight in weights.items()}
    dense = outputs_of(case.model, case.tokens)
    with torch.no_grad():
        arguments = {"input_ids": case.tokens, "use_cache": False}
        expected = torch.func.functional_call(case.model, parameters, kwargs=arguments).logits
    projected = projected_outputs(case.model, case.units, case.vectors, case.tokens)
    assert torch.equal(outputs_of(case.model, case.tokens), dense)  # nothing is left on the model
    report = merge_model(case.model, case.units, case.vectors)
    merged = outputs_of(case.model, case.tokens)
    assert (merged - dense).abs().max() > 1e-3  # something was removed
    for ours in (merged, projected):
        assert (ours - expected).abs().max() <= 1e-11 * expected.abs().max()  # blocks of float64 rounding
    for name, weight in weights.items():
        layer = case.model.get_submodule(name)
        sides = {unit.side for unit in case.units if name in unit.members}
        assert isinstance(layer, FactoredLinear)
        assert layer.sides == sides
        assert (layer.core is not None) == (len(sides) == 2)
        assert (product(layer) - weight).abs().max() <= 1e-13 * weight.abs().max().clamp_min(1)
    assert list(report) == [unit.name for unit in case.units]
    for unit in case.units:
        assert report[unit.name].rank == case.ranks[unit.name]
        assert report[unit.name].error <= 1e-13
        assert report[unit.name].dropped == 0


def product(layer: FactoredLinear) -> Tensor:
    factors = [layer.output_factor, layer.core, layer.input_factor]
    return torch.linalg.multi_dot([factor.weight.double() for factor in factors if factor is not None])


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_of_the_units_does_not_matter(double, layout, tolerance):
    case = double("qwen3", layout)
    other = copy.deepcopy(case.model)
    report = merge_model(case.model, case.units, case.vectors, tolerance=tolerance)
    reverse = merge_model(other, case.units[::-1], case.vectors, tolerance=tolerance)
    assert list(reverse) == list(report)[::-1]
    assert reverse == report
    ours, theirs = case.model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_counted_parameters_by_hand(double):
    """A block's factors: A (28, 48), q (48, 28), cores (14, 28), B (24, 14)."""
    case = double("qwen3")
    assert {unit.dimension for unit in case.units if unit.side == "output"} == {24}
    block = 28 * 48 + 48 * 28 + 2 * 14 * 28 + 24 * 14
    assert merged_parameters(case.units, case.ranks) == 2 * block
    one = {case.units[0].name: 28}  # units without a rank stay dense and are not counted
    assert merged_parameters(case.units, one) == case.units[0].factor_parameters(28)
    assert merged_parameters(case.units[::-1], case.ranks) == 2 * block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_once_and_loaded_bit_for_bit(double, tmp_path, family, layout, dtype):
    case = double(family, layout, dtype)
    members = {name for unit in case.units for name in unit.members}
    dense = sum(p.numel() for p in case.model.parameters())
    dense -= sum(weight_of(case.model.get_submodule(name)).numel() for name in members)
    merge_model(case.model, case.units, case.vectors)
    save_compressed(case.model, case.units, tmp_path / "first")
    stored = load_file(tmp_path / "first" / WEIGHTS)
    buffers = {name for name, _ in case.model.named_buffers()}
    count = sum(tensor.numel() for name, tensor in stored.items() if name not in buffers)
    assert count == dense + merged_parameters(case.units, case.ranks)
    loaded = load_compressed(tmp_path / "first")
    assert torch.equal(outputs_of(loaded, case.tokens), outputs_of(case.model, case.tokens))
    for unit in case.units:
        layers = [loaded.model.get_submodule(name) for name in unit.members]
        assert len({id(getattr(layer, f"{unit.side}_factor")) for layer in layers}) == 1
        if unit.side == "input" and len(layers) > 1:
            assert layers[0].input_factor._once.readers == len(layers)
    loaded.save_pretrained(tmp_path / "again")
    for name in (WEIGHTS, "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("layout", ["paper", "single"])
def test_one_side_may_stay_dense(double, tmp_path, layout, side):
    """The units that were not merged are not described, though their members are factored."""
    case = double("opt", layout)
    vectors = {unit.name: case.vectors[unit.name] for unit in case.units if unit.side == side}
    assert merge_model(case.model, case.units, vectors).keys() == vectors.keys()
    save_compressed(case.model, case.units, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["units"]
    assert [unit["name"] for unit in described] == list(vectors)
    assert torch.equal(outputs_of(load_compressed(tmp_path), case.tokens), outputs_of(case.model, case.tokens))


class Products(TorchFunctionMode):
    """Keeps the weights of the linear products made."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


def test_latent_is_computed_once_a_pass(double):
    """The input latent and each core once; the output factor by each of its two members."""
    case = double("qwen3")
    merge_model(case.model, case.units, case.vectors)
    with Products() as products:
        outputs_of(case.model, case.tokens)
    outer = {
        id(case.model.get_submodule(unit.members[0]).output_factor) for unit in case.units if unit.side == "output"
    }
    layers = [module for module in case.model.modules() if isinstance(module, FactoredLinear)]
    held = [(layer.input_factor, layer.core, layer.output_factor) for layer in layers]
    factors = {id(factor): factor for three in held for factor in three if factor is not None}.values()
    assert len(factors) == 2 * (1 + 1 + 2 + 1)  # a block's A, B of q, two cores, shared B
    for factor in factors:
        made = sum(weight is factor.weight for weight in products.weights)
        assert made == (2 if id(factor) in outer else 1)
    shared = [factor for factor in factors if isinstance(factor, Shared) and factor._once.readers > 1]
    assert [factor._once.readers for factor in shared] == [3, 3]
    assert all(factor._once._held is None for factor in shared)


@pytest.mark.parametrize(("dtype", "roundoff"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-9)])
def test_narrow_factors_are_rounded_once(double, dtype, roundoff):
    """Each of three factors is rounded once from float64; the report says how far the product is off."""
    case = double("qwen3", dtype=dtype)
    weights = case.weights()
    originals = {name: weight_of(case.model.get_submodule(name)).detach().double() for name in weights}
    report = merge_model(case.model, case.units, case.vectors)
    errors = {}
    for name, weight in weights.items():
        layer = case.model.get_submodule(name)
        factors = [
            factor.weight for factor in (layer.output_factor, layer.core, layer.input_factor) if factor is not None
        ]
        assert {factor.dtype for factor in factors} == {dtype}
        bound = 4 * roundoff * torch.linalg.multi_dot([factor.double().abs() for factor in factors])
        off = (product(layer) - weight).abs()
        assert (off <= bound).all(), name
        errors[name] = off.max().item()
    for unit in case.units:
        largest = max(originals[name].abs().max().item() for name in unit.members)
        error = max(errors[name] for name in unit.members) / largest
        assert error > 0
        assert report[unit.name].error == pytest.approx(error, rel=1e-6)


def test_tolerance_drops_singular_values_of_what_both_leave(double):
    """Against the left singular vectors of each unit's stack of doubly projected weights."""
    case = double("qwen3")
    weights = case.weights()
    originals = {name: weight_of(case.model.get_submodule(name)).detach() for name in weights}
    narrow = {}
    tolerance = 1.0
    for unit in case.units:
        stack = torch.cat([weights[name].T if unit.side == "input" else weights[name] for name in unit.members], 1)
        left, singular, _ = torch.linalg.svd(stack, full_matrices=False)
        kept = singular > tolerance
        narrow[unit.name] = left[:, kept], (singular[~kept].norm() / singular.norm()).item()
    best = dict(weights)
    for unit in case.units:
        p = narrow[unit.name][0] @ narrow[unit.name][0].T
        for name in unit.members:
            best[name] = best[name] @ p if unit.side == "input" else p @ best[name]
    report = merge_model(case.model, case.units, case.vectors, tolerance=tolerance)
    narrowed = {unit.side for unit in case.units if report[unit.name].rank < case.ranks[unit.name]}
    assert narrowed == {"input", "output"}
    assert all(
        basis.shape[1] > 0 for basis, _ in narrow.values()
    )  # none is saved by the rule that a rank is at least 1
    off = {name: (product(case.model.get_submodule(name)) - weights[name]).abs().max().item() for name in weights}
    for name, weight in best.items():
        assert (product(case.model.get_submodule(name)) - weight).abs().max() <= 1e-10  # vectors next to a gap
    for unit in case.units:
        assert report[unit.name].rank == narrow[unit.name][0].shape[1]
        assert report[unit.name].dropped == pytest.approx(narrow[unit.name][1], rel=1e-9)
        largest = max(originals[name].abs().max().item() for name in unit.members)
        assert report[unit.name].error == pytest.approx(max(off[name] for name in unit.members) / largest, rel=1e-6)


def test_two_units_on_one_side_are_an_error(double):
    case = double()
    again = replace(case.units[0], name="again", members=case.units[0].members[1:2], others=case.units[0].others[1:2])
    vectors = case.vectors | {"again": case.vectors[case.units[0].name]}
    with pytest.raises(ValueError, match=r"k_proj is in two units on its input side: leave one of them out"):
        merge_model(case.model, [*case.units, again], vectors)
    assert not any(isinstance(module, FactoredLinear) for module in case.model.modules())


def test_merging_one_side_after_the_other_is_an_error(double):
    case = double()
    inputs, outputs = ([unit for unit in case.units if unit.side == side] for side in ("input", "output"))
    merge_model(case.model, inputs, case.vectors)
    with pytest.raises(ValueError, match=r"k_proj was merged before: merge all units of a layer in one call"):
        merge_model(case.model, outputs, case.vectors)
