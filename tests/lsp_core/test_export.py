"""Compressed checkpoints written as dense ones: the same function, loadable without ``lsp_core``, or an error."""

import itertools
import subprocess
import sys
import sysconfig
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import lsp_core.export as exporting
from lsp_core.discovery import discover_units
from lsp_core.export import ParityError, densify, export_dense
from lsp_core.merging import merge_model
from lsp_core.modeling import compressed, load_compressed, save_compressed
from lsp_core.modeling_lsp import FactoredLinear
from lsp_core.units import Unit, weight_of
from tests.contract.cases import DTYPES, prepare
from tests.contract.families import FAMILIES, QUICK

# without the site's own additions to the path, among which lsp_core may be
PLAIN_PROCESS = f"""
import sys
sys.path += {sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})}
import torch, transformers
from safetensors.torch import load_file, save_file
try:
    import lsp_core
except ImportError:
    pass
else:
    raise SystemExit("lsp_core is on the path: nothing is shown")
torch.set_num_threads(1)
auto, folder = sys.argv[1:]
model = getattr(transformers, auto).from_pretrained(folder)
with torch.no_grad():
    result = model(**load_file(folder + "/arguments.tensors"))
output = result.last_hidden_state if getattr(result, "logits", None) is None else result.logits
save_file({{"output": output.contiguous()}}, folder + "/output.tensors")
"""

CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if name in QUICK else pytest.mark.slow)
    for name in FAMILIES
    for dtype in DTYPES
]


def merge_and_save(case, folder, units=None, vectors=None):
    """Merges a copy of the case's model and saves it in ``folder``; returns the merged model."""
    model = case.copy_model()
    units = case.units if units is None else units
    merge_model(model, units, case.perturbed() if vectors is None else vectors)
    save_compressed(model, units, folder)
    return model


def products_of(merged):
    """W = B (C) A of each factored layer, (D_out, D_in), term by term in float64."""
    products = {}
    for name, layer in merged.named_modules():
        if isinstance(layer, FactoredLinear):
            a, b = layer.input_factor.weight.double(), layer.output_factor.weight.double()
            inner = a if layer.core is None else torch.einsum("pr,ri->pi", layer.core.weight.double(), a)
            products[name] = torch.einsum("or,ri->oi", b, inner)
    return products


def check_layers(case, merged, dense):
    """Each layer is its product rounded once, of the original's class and with its bias; all else is as it was.

    ``dense`` is given in its dtype: half a unit in the last place, and 1e-12 for sums of some hundred terms in float64.
    """
    products = products_of(merged)
    assert products
    for name, product in products.items():
        layer, original = dense.get_submodule(name), case.model.get_submodule(name)
        assert type(layer) is type(original)
        error = (weight_of(layer).double() - product).abs()
        assert (error <= torch.finfo(dense.dtype).eps / 2 * product.abs() + 1e-12).all(), name
        assert (layer.bias is None) == (original.bias is None)
        assert layer.bias is None or torch.equal(layer.bias, original.bias.to(dense.dtype))
    state, before = dense.state_dict(), case.model.state_dict()
    assert state.keys() == before.keys()
    others = [name for name in before if name.rpartition(".")[0] not in products]
    assert all(torch.equal(state[name], before[name].to(state[name].dtype)) for name in others)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_same_function_layer_by_layer_and_as_a_whole(name, dtype, tmp_path):
    """As a whole within four times what the factored model itself loses to rounding, against it in float64."""
    case = prepare(name, DTYPES[dtype])
    merged = merge_and_save(case, tmp_path / "compressed")
    done = export_dense(tmp_path / "compressed", tmp_path / "dense")
    dense = type(case.model).from_pretrained(tmp_path / "dense")
    if name != "bert":  # whose pooler no compressed model has
        check_layers(case, merged, dense)
    exact = case.outputs(case.in_float64(merged))
    rounding = (case.outputs(merged).double() - exact).abs().max()
    changed = (case.outputs(case.model).double() - exact).abs().max()
    assert 4 * rounding < changed / 2, "the comparison must see what was removed"
    assert (case.outputs(dense).double() - exact).abs().max() <= 4 * rounding
    assert 0 < done.difference <= done.tolerance
    assert done.architecture == type(case.model).__name__
    assert done.dtype == dtype
    assert done.parameters == sum(parameter.numel() for parameter in dense.parameters())
    assert done.num_bytes == done.parameters * torch.finfo(case.dtype).bits // 8
    assert done.compressed_parameters == merged.num_parameters()
    assert done.layers == len(products_of(merged))


@pytest.mark.parametrize(
    "name", ["llama", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert", "qwen3_moe"))]
)
def test_what_is_written_needs_no_code_of_ours(name, tmp_path):
    """Loaded by the Auto class in a process that cannot import lsp_core: the same bits as here."""
    case = prepare(name, torch.float32)
    merge_and_save(case, tmp_path / "compressed")
    export_dense(tmp_path / "compressed", tmp_path / "dense")
    model = type(case.model).from_pretrained(tmp_path / "dense")
    arguments = {k: v for k, v in case.inputs.arguments(case.examples, model).items() if isinstance(v, torch.Tensor)}
    save_file({k: v.contiguous() for k, v in arguments.items()}, tmp_path / "dense" / "arguments.tensors")
    command = [sys.executable, "-S", "-E", "-c", PLAIN_PROCESS, case.family.auto.__name__, str(tmp_path / "dense")]
    subprocess.run(command, check=True, cwd=tmp_path)
    there = load_file(tmp_path / "dense" / "output.tensors")["output"]
    assert torch.equal(there, case.outputs(model))


def test_layers_with_a_core_are_multiplied_through_it(tmp_path):
    """K and V tied on their output beside Q/K/V tied on their input: W = B C A."""
    case = prepare("opt", torch.bfloat16)
    both, vectors = [], {}
    for unit in case.units:
        if len(unit.members) == 3:
            members = unit.members[1:]
            options = {"members": members, "dimension": unit.others[1], "others": (unit.dimension,) * 2}
            both.append(Unit(name=f"{unit.name} out", side="output", block=unit.block, roles=("",) * 2, **options))
            vectors[both[-1].name] = torch.randn(unit.others[1], 15, dtype=torch.float64)
    vectors |= case.perturbed()
    merged = merge_and_save(case, tmp_path / "compressed", [*case.units, *both], vectors)
    assert sum(layer.core is not None for layer in merged.modules() if isinstance(layer, FactoredLinear)) == 4
    done = export_dense(tmp_path / "compressed", tmp_path / "dense")
    check_layers(case, merged, type(case.model).from_pretrained(tmp_path / "dense"))
    assert done.difference <= done.tolerance


def test_a_layer_with_two_names_stays_one():
    """Held in memory: transformers stores no module that occurs twice."""
    case = prepare("llama", torch.float32)
    model = case.copy_model()
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    units = [unit for unit in case.units if unit.block == 0]
    merge_model(model, units, {unit.name: case.perturbed()[unit.name] for unit in units})
    dense = densify(compressed(model, units))
    assert type(dense.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert dense.model.layers[1].mlp.up_proj is dense.model.layers[0].mlp.up_proj


@pytest.mark.parametrize(
    ("stored", "target"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float64")]
)
def test_another_dtype_is_rounded_to_once(stored, target, tmp_path):
    """From the factors as they are stored, not from factors rounded to the target first."""
    case = prepare("gpt2", DTYPES[stored])
    merged = merge_and_save(case, tmp_path / "compressed")
    done = export_dense(tmp_path / "compressed", tmp_path / "dense", dtype=getattr(torch, target))
    dense = type(case.model).from_pretrained(tmp_path / "dense")
    assert done.dtype == target == str(dense.dtype).removeprefix("torch.")
    check_layers(case, merged, dense)
    assert done.difference <= done.tolerance


def test_tied_embeddings_are_stored_once(tmp_path):
    case = prepare("gpt2", torch.float32)
    merge_and_save(case, tmp_path / "compressed")
    export_dense(tmp_path / "compressed", tmp_path / "dense")
    with safe_open(tmp_path / "dense" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    dense = type(case.model).from_pretrained(tmp_path / "dense")
    assert dense.lm_head.weight is dense.transformer.wte.weight


def test_factors_are_freed_as_they_are_multiplied(tmp_path, monkeypatch):
    """When a layer is multiplied, of those before it no factor is left but what later ones share."""
    case = prepare("llama", torch.float32)
    merge_and_save(case, tmp_path)
    seen, left = [], []
    multiply = exporting.dense_weight

    def watched(layer):
        left.append(sum(one() is not None for one in seen))
        seen.append(weakref.ref(layer.output_factor))  # of an input-tied group each layer's own
        return multiply(layer)

    monkeypatch.setattr(exporting, "dense_weight", watched)
    model = load_compressed(tmp_path)
    units = {unit["name"]: unit for unit in model.config.units}
    assert all(unit["side"] == "input" or len(unit["members"]) == 1 for unit in units.values())
    densify(model)
    assert len(left) == 21
    assert max(left) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("damage", [lambda w: w.mT.contiguous() if w.shape[0] == w.shape[1] else w, lambda w: 1.5 * w])
def test_another_function_is_refused(damage, dtype, tmp_path, monkeypatch):
    """Square weights turned around, as a forgotten transposition would have them; a scale."""
    case = prepare("llama", DTYPES[dtype])
    merge_and_save(case, tmp_path / "compressed")
    multiply = exporting.dense_weight
    monkeypatch.setattr(exporting, "dense_weight", lambda layer: damage(multiply(layer)))
    with pytest.raises(ParityError, match=rf"differ from those of .* by .* that rounding to {dtype} explains"):
        export_dense(tmp_path / "compressed", tmp_path / "dense")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "damage", [lambda w: 1.2 * w, lambda w: w.roll(1, 0), lambda w: w * (torch.rand(w.shape) > 0.01)]
)
def test_one_wrong_layer_of_a_deep_model_is_refused(damage, dtype, tmp_path, monkeypatch):
    """Scaled, in another order, or without a hundredth of its weights; in 16 bits the outputs tell only the worst."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=24)).to(DTYPES[dtype]).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 8  # of a deviation of 0.16, as the width asks for
    units = discover_units(model)
    merge_model(model, units, {unit.name: torch.randn(unit.dimension, unit.dimension // 3) for unit in units})
    save_compressed(model, units, tmp_path / "compressed")
    multiply, count = exporting.dense_weight, itertools.count()
    monkeypatch.setattr(exporting, "dense_weight", lambda w: damage(multiply(w)) if next(count) == 90 else multiply(w))
    with pytest.raises(ParityError, match=f"rounding to {dtype} explains"):
        export_dense(tmp_path / "compressed", tmp_path / "dense")
    monkeypatch.setattr(exporting, "dense_weight", multiply)
    assert export_dense(tmp_path / "compressed", tmp_path / "dense").layers == 24 * 7


def test_outputs_that_are_not_finite_are_refused(tmp_path, monkeypatch):
    case = prepare("llama", torch.float32)
    merge_and_save(case, tmp_path / "compressed")
    multiply = exporting.dense_weight
    monkeypatch.setattr(exporting, "dense_weight", lambda layer: multiply(layer) * float("nan"))
    with pytest.raises(ParityError, match="by nan of their size"):
        export_dense(tmp_path / "compressed", tmp_path / "dense")


def test_a_model_that_is_not_compressed_is_refused(tmp_path):
    prepare("llama", torch.float32).model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="'llama' model, not a compressed one"):
        export_dense(tmp_path / "plain", tmp_path / "dense")
    assert not (tmp_path / "dense").exists()
