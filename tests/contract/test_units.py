"""What the blocks of each family become, worked out by hand."""

import re
from fnmatch import fnmatch

import torch

from lsp_core.discovery import discover_units
from lsp_core.units import LINEAR_TYPES, find_blocks
from tests.contract.cases import build
from tests.contract.families import FAMILIES


def short(unit, prefix):
    """Members without the prefix and the block's number, side, dimension, other sides, roles."""
    start = re.match(rf"{re.escape(prefix)}\.\d+\.", unit.members[0]).group()
    assert all(name.startswith(start) for name in unit.members)
    return "+".join(name.removeprefix(start) for name in unit.members), *(
        unit.side,
        unit.dimension,
        unit.others,
        unit.roles,
    )


def test_units_are_the_expected_ones(case):
    for block, (prefix, expected) in case.family.blocks.items():
        assert [short(unit, prefix) for unit in case.units if unit.block == block] == expected


def test_every_matrix_of_the_blocks_is_in_one_unit_or_reported(case):
    """Parameters of two dimensions and more: fused experts and position tables are no linear layers."""
    members = [f"{name}.weight" for unit in case.units for name in unit.members]
    assert len(set(members)) == len(members)
    names = {module: name for name, module in case.model.named_modules()}
    matrices = {
        f"{names[block]}.{name}"
        for block in find_blocks(case.model)
        for name, parameter in block.named_parameters(remove_duplicate=False)
        if parameter.dim() >= 2
    }
    assert set(members) <= matrices
    alone = matrices - set(members)
    assert {name for name in alone if any(fnmatch(name, pattern) for pattern in case.family.alone)} == alone
    assert all(any(fnmatch(name, pattern) for name in alone) for pattern in case.family.alone)
    layers = {f"{n}.weight": n for n, m in case.model.named_modules() if isinstance(m, LINEAR_TYPES)}
    assert case.left_alone.keys() == {layers.get(name, name) for name in alone}


def test_units_hold_the_parameters_of_their_layers(case):
    for unit in case.units:
        layers = [case.model.get_submodule(name) for name in unit.members]
        assert unit.parameters == sum(layer.weight.numel() for layer in layers)


def test_weights_of_the_embeddings_are_never_touched(case):
    ends = (case.model.get_input_embeddings(), case.model.get_output_embeddings())
    embedded = {id(p) for end in ends if end is not None for p in end.parameters()}
    assert embedded
    assert not any(id(case.model.get_submodule(name).weight) in embedded for u in case.units for name in u.members)


def test_a_frozen_model_the_meta_device_and_eager_attention_give_the_same(case):
    """A frozen model's layers have outputs without a gradient, which some blocks change in place."""
    frozen = case.copy_model().requires_grad_(False)
    assert discover_units(frozen) == case.units
    with torch.device("meta"):
        empty = case.family.auto.from_config(case.family.config(), dtype=case.dtype)
        eager = case.family.auto.from_config(case.family.config(), dtype=case.dtype, attn_implementation="eager")
    assert discover_units(empty) == discover_units(eager) == case.units


def test_families_differ():
    """The suite would say little of sixteen names of one structure."""
    structures = {name: repr(sorted(build(name, torch.float32).state_dict())) for name in FAMILIES}
    assert len(set(structures.values())) >= 13
