"""The merged model against the dense one and the projected one, and the parameters that it holds."""

import pytest
import torch
from safetensors import safe_open

from lsp_core.merging import merge_model, outputs_of, projected_outputs
from lsp_core.modeling import WEIGHTS, save_compressed
from lsp_core.projector import attached


def test_removing_nothing_changes_nothing(case):
    model = case.copy_model()
    dense = case.outputs(model)
    with attached(model, case.units, case.bases, dict.fromkeys(case.removed, 0)) as projectors:
        assert projectors == {}
        assert torch.equal(case.outputs(model), dense)
    assert merge_model(model, case.units, {}) == {}
    assert torch.equal(case.outputs(model), dense)
    assert torch.equal(dense, case.outputs(case.model))


def test_projected_equals_merged(case):
    """Within what the dtype does to these networks.

    Rounding is measured, not guessed: the merged network in its dtype against the same factors in float64. A projected
    layer rounds twice what a merged one rounds once (U, the latent, the difference), in numbers of the dense size; five
    times the largest error seen is allowed.
    """
    vectors = case.perturbed()
    projected = projected_outputs(case.model, case.units, vectors, case.examples).double()
    model = case.copy_model()
    report = merge_model(model, case.units, vectors)
    merged = outputs_of(model, case.examples).double()
    exact = outputs_of(case.in_float64(model), case.examples)
    limit = 5 * (merged - exact).abs().max()
    changed = (merged - outputs_of(case.model, case.examples).double()).abs().max()
    assert limit < changed / 4, "the comparison must see what was removed"
    assert (projected - merged).abs().max() <= limit
    assert report.keys() == vectors.keys()
    eps = torch.finfo(case.dtype).eps
    for unit in case.units:
        assert report[unit.name].rank == unit.dimension - case.removed[unit.name]
        assert report[unit.name].error <= 2 * eps


@pytest.mark.parametrize("share", [0.3, 0.55])
def test_counted_parameters_are_the_stored_ones(case, tmp_path, share):
    """Dense parameters minus what each unit saves, negative where the rank is above break-even."""
    model = case.copy_model()
    dense = sum(parameter.numel() for parameter in model.parameters())
    removed = {unit.name: int(share * unit.dimension) for unit in case.units}
    merge_model(model, case.units, {u.name: case.bases[u.name][:, -removed[u.name] :] for u in case.units})
    save_compressed(model, case.units, tmp_path)
    buffers = {name for name, _ in model.named_buffers()}
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys() if name not in buffers)  # noqa: SIM118
    assert stored == dense - sum(unit.saved(removed[unit.name]) for unit in case.units)
