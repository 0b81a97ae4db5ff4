"""The size of a checkpoint against the file that is saved, and the ratio that fits against every ratio."""

import itertools

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from lsp_core.allocation import UnitCurve, greedy, largest_ratio, uniform_rank
from lsp_core.fit import GIB, checkpoint_bytes, ratio_to_fit
from lsp_core.merging import merge_model, removed_directions
from lsp_core.modeling import WEIGHTS, save_compressed
from lsp_core.sensitivity import removal_counts


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_is_that_of_the_tensors_in_the_file(prepare, tmp_path, family, dtype):
    """Tied embeddings, factors that are shared and buffers that stay included."""
    case = prepare(family)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(case.model.config)
    expected = checkpoint_bytes(empty, case.units, case.removed, dtype=dtype)
    model = case.model.to(dtype)
    vectors = {name: removed_directions(case.bases[name], count) for name, count in case.removed.items()}
    merge_model(model, case.units, vectors)
    save_compressed(model, case.units, tmp_path)
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        size = sum(tensor.numel() * tensor.element_size() for tensor in map(file.get_tensor, file.keys()))
    assert size == expected


@pytest.fixture
def curves(prepare):
    case = prepare("llama")
    counts = {unit.name: removal_counts(unit, 8) for unit in case.units}
    return case, [UnitCurve(unit=u, counts=counts[u.name], kl=tuple(map(float, counts[u.name]))) for u in case.units]


def size_of(case, allocation):
    return checkpoint_bytes(case.model, case.units, allocation.removed, dtype=torch.float32)


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.83, 1.0])
def test_the_ratio_is_the_smallest_that_fits(curves, share):
    """Against all savings of whole parameters: one fewer does not fit, and every allocation by it does."""
    case, measured = curves
    dense = checkpoint_bytes(case.model, case.units, {}, dtype=torch.float32)
    total, largest = sum(unit.parameters for unit in case.units), largest_ratio(measured)
    room = dense - int(share * largest * total) * 4
    ratio = ratio_to_fit(case.model, case.units, room / GIB, dtype=torch.float32, largest=largest)
    least = next(saved for saved in itertools.count() if dense - 4 * saved <= room)
    assert ratio * total == pytest.approx(least, abs=1e-6)
    sizes = [
        size_of(case, greedy(measured, ratio, at_least=True)),
        size_of(case, uniform_rank(case.units, ratio, at_least=True)),
    ]
    assert all(size <= room for size in sizes)
    one_rank = 4 * max(unit.factor_parameters(1) for unit in case.units)
    assert sizes[0] > room - one_rank


def test_a_size_between_two_parameters_is_rounded_to_the_safe_side(curves):
    case, measured = curves
    dense = checkpoint_bytes(case.model, case.units, {}, dtype=torch.float32)
    room = dense - 4 * 1000 - 1
    ratio = ratio_to_fit(case.model, case.units, room / GIB, dtype=torch.float32, largest=largest_ratio(measured))
    assert ratio * sum(unit.parameters for unit in case.units) == pytest.approx(1001, abs=1e-6)


def test_a_size_that_the_dense_model_has(curves):
    case, measured = curves
    dense = checkpoint_bytes(case.model, case.units, {}, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"fits into .* nothing is to be done"):
        ratio_to_fit(case.model, case.units, dense / GIB, dtype=torch.float32, largest=largest_ratio(measured))


def test_a_size_below_the_smallest_states_one_that_works(curves):
    case, measured = curves
    largest = largest_ratio(measured)
    smallest = size_of(case, greedy(measured, largest))
    with pytest.raises(ValueError, match="cannot be reached: the smallest model takes") as error:
        ratio_to_fit(case.model, case.units, (smallest - 4) / GIB, dtype=torch.float32, largest=largest)
    stated = float(str(error.value).split("takes ")[1].split(" GiB")[0])
    assert smallest <= stated * GIB <= 1.01 * smallest
    assert ratio_to_fit(case.model, case.units, stated, dtype=torch.float32, largest=largest) <= largest
