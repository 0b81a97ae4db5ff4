"""The streamed grid against truncated weights and full forward passes of the whole model."""

import math

import pytest
import torch

from lsp_core.sensitivity import Sensitivity
from lsp_core.units import weight_of
from tests.contract.cases import MICRO_BATCH, kl


@torch.no_grad()
def naive(case, dense, model, removed) -> float:
    """Mean KL of ``model``, a copy, with weights multiplied by dense projectors and rounded; puts them back."""
    weights = []
    for unit in case.units:
        gone = case.bases[unit.name][:, unit.dimension - removed.get(unit.name, 0) :]
        projector = torch.eye(unit.dimension, dtype=torch.float64) - gone @ gone.T
        for member in unit.members if gone.shape[1] else ():
            w = weight_of(model.get_submodule(member))
            weights.append((w, w.clone()))
            w.copy_(w.double() @ projector if unit.side == "input" else projector @ w.double())
    value = kl(dense, case.log_probabilities(model)).mean().item()
    for w, original in weights:
        w.copy_(original)
    return value


def tolerance(case, dense) -> float:
    """Nats. Both run the same products on the same bits up to the head; ours goes on in float32, the oracle in float64.

    The divergence sums two inner products of D and V numbers for the teacher and as many for the student, each of
    logits no larger than S in size; roundings of 2^-24 add up like a random walk, four deviations are allowed.
    """
    head = case.model.get_output_embeddings()
    terms = dense.shape[-1] + (head.weight.shape[1] if head is not None else 0)
    size = (dense.amax(-1) - dense.amin(-1)).max().item()
    return 4 * math.sqrt(2 * terms) * 2.0**-24 * max(1.0, size)


def test_streamed_equals_naive(case):
    """Every unit, at its shallowest, a middle and its deepest count."""
    dense = case.log_probabilities(case.model)
    limit = tolerance(case, dense)
    sensitivity = Sensitivity(
        case.model, case.units, case.bases, case.examples, micro_batch=MICRO_BATCH, inputs=case.inputs
    )
    model = case.copy_model()
    for unit in case.units:
        for count in (1, unit.dimension // 2, unit.dimension - 1):
            ours, expected = sensitivity.measure(unit.name, count), naive(case, dense, model, {unit.name: count})
            assert abs(ours - expected) <= limit, (unit.name, count, ours, expected)
            assert sensitivity.stream.possible, "the whole model was run instead"
        assert ours > 10 * limit, (unit.name, "the deepest truncation must be seen")


def test_joint_equals_naive_and_leaves_the_model_as_it_was(case):
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    dense = case.log_probabilities(case.model)
    limit = tolerance(case, dense)
    sensitivity = Sensitivity(
        case.model, case.units, case.bases, case.examples, micro_batch=MICRO_BATCH, inputs=case.inputs
    )
    expected = naive(case, dense, case.copy_model(), case.removed)
    assert abs(sensitivity.joint(case.removed) - expected) <= limit
    assert sensitivity.joint(dict.fromkeys(case.removed, 0)) == pytest.approx(0, abs=limit)
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())
    assert not any("forward" in m.__dict__ or m._forward_pre_hooks or m._forward_hooks for m in case.model.modules())
