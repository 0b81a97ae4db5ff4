"""The streamed grid against a full forward pass per candidate and stored logits."""

import copy
import dataclasses

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from lsp_core.discovery import discover_units
from lsp_core.gram import NonFiniteError
from lsp_core.readout import Readout
from lsp_core.sensitivity import Sensitivity, counts_to_measure, projected_weight, removal_counts, truncated
from lsp_core.units import find_blocks, weight_of

TOLERANCE = 1e-12  # nats; float64 logits of a few units, summed over 101 entries


def naive(case, oracles, removed) -> float:
    """Mean KL over all tokens, from the logits of a copy whose weights are multiplied by a dense projector."""
    model = copy.deepcopy(case.model)
    with torch.no_grad():
        for name, count in removed.items():
            unit, q = case.by_name[name], case.bases[name]
            gone = q[:, q.shape[1] - count :]
            projector = torch.eye(len(q), dtype=q.dtype) - gone @ gone.T
            for member in unit.members:
                w = weight_of(model.get_submodule(member))
                w.copy_(w @ projector if unit.side == "input" else projector @ w)
        return oracles.kl(case.logits(), model(input_ids=case.tokens, use_cache=False).logits).mean().item()


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "qwen3", "gemma2"])
def test_streamed_equals_naive(prepare, oracles, family):
    """Every unit of every block, at a shallow, a middle and a deep count; batches of uneven sizes."""
    case = prepare(family)
    state = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    sensitivity = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)
    for unit in case.units:
        for count in (1, unit.dimension // 2, unit.dimension - 1):
            ours = sensitivity.measure(unit.name, count)
            expected = naive(case, oracles, {unit.name: count})
            assert ours > TOLERANCE, "the candidate must be seen"
            assert abs(ours - expected) <= TOLERANCE, (unit.name, count)
    assert all(torch.equal(tensor, state[name]) for name, tensor in case.model.state_dict().items())
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in case.model.modules())


def test_blocks_that_return_a_tuple_are_streamed_too(prepare, oracles):
    """A Bloom block returns the hidden state and its attention weights; six, so that no bare tensor passes for it."""
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=48, n_head=4, n_layer=6, vocab_size=101, initializer_range=0.2))
    model = model.double().eval()
    units = discover_units(model)
    bases = {u.name: torch.linalg.qr(torch.randn(u.dimension, u.dimension, dtype=torch.float64)).Q for u in units}
    case = dataclasses.replace(prepare("llama"), model=model, units=units, bases=bases)
    returned = []
    handle = find_blocks(model)[0].register_forward_hook(lambda _, __, output: returned.append(output))
    case.logits()
    handle.remove()
    assert isinstance(returned[0], tuple)
    assert len(returned[0]) == 2
    sensitivity = Sensitivity(model, units, bases, case.tokens, micro_batch=4)
    unread = (None,)  # no block reads the weights of the one before it
    assert sensitivity.stream.extras == [unread] * len(sensitivity.batches)
    for unit in units:
        ours = sensitivity.measure(unit.name, unit.dimension // 2)
        expected = naive(case, oracles, {unit.name: unit.dimension // 2})
        assert ours > TOLERANCE, "the candidate must be seen"
        assert abs(ours - expected) <= TOLERANCE, unit.name


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_joint_removes_all_at_once(prepare, oracles, family):
    case = prepare(family)
    sensitivity = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)
    removed = case.removed | {case.units[0].name: 0}
    last = case.units[-1]
    isolated = sensitivity.measure(last.name, case.removed[last.name])
    assert abs(sensitivity.joint(removed) - naive(case, oracles, removed)) <= TOLERANCE
    assert sensitivity.joint({}) == pytest.approx(0, abs=TOLERANCE)
    # the joint measure neither needs nor moves the place that the stream has reached
    assert sensitivity.measure(last.name, case.removed[last.name]) == isolated


def test_blocks_before_the_measured_one_are_skipped(prepare):
    case = prepare("llama")
    calls = []
    for index, block in enumerate(case.model.model.layers):
        block.self_attn.register_forward_hook(lambda *_, index=index: calls.append(index))
    sensitivity = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=6)
    for unit in case.units:
        sensitivity.measure(unit.name, 5)
        calls.clear()
        sensitivity.measure(unit.name, 6)
        assert calls == list(range(unit.block, 3))


def test_the_teacher_is_no_logits(prepare):
    """D + 2 numbers a token, and one hidden state of one block."""
    case = prepare("llama")
    sensitivity = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)
    kept = [t for s in sensitivity.teacher for t in (s.m, s.c, s.entropy)] + sensitivity.stream.inputs
    assert sum(t.numel() for t in kept) == case.tokens.numel() * (2 * 48 + 2)


def test_softcapped_head_goes_through_full_logits(prepare, make_model):
    case = prepare("gemma2")
    assert Readout(case.model).head is None
    assert Readout(make_model("llama")).head is not None
    features = Readout(case.model).outputs(case.tokens)
    assert torch.equal(features, case.logits())


def test_going_back_is_an_error(prepare):
    case = prepare("llama")
    sensitivity = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)
    first, last = case.units[0], case.units[-1]
    sensitivity.measure(first.name, 5)
    sensitivity.measure(last.name, 5)
    with pytest.raises(ValueError, match="block 0 comes before block 2"):
        sensitivity.measure(first.name, 5)


def test_starting_in_the_middle_equals_going_through(prepare):
    """A killed run measures from its first missing row on."""
    case = prepare("opt")
    through = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)
    rows = {unit.name: through.measure(unit.name, 20) for unit in case.units}
    resumed = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)
    for unit in case.units[6:]:
        assert resumed.measure(unit.name, 20) == rows[unit.name]


def test_non_finite_divergence_names_the_unit(prepare):
    case = prepare("llama")
    name = case.units[2].name
    case.bases[name] = case.bases[name] * torch.nan
    sensitivity = Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)
    with pytest.raises(NonFiniteError, match=rf"7 directions of unit {name.replace('+', '.')}"):
        sensitivity.measure(name, 7)
    with pytest.raises(NonFiniteError, match="joint"):
        sensitivity.joint({name: 7})


def test_non_finite_logits_are_refused(prepare):
    case = prepare("llama")
    with torch.no_grad():
        case.model.lm_head.weight[3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match="logits"):
        Sensitivity(case.model, case.units, case.bases, case.tokens, micro_batch=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_restored_bit_for_bit(prepare, make_model, dtype):
    case, model = prepare("gpt2"), make_model("gpt2", dtype)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = []

    def interrupted() -> None:
        with torch.no_grad(), truncated(model, case.removed, case.by_name, case.bases):
            changed.extend(name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(changed) == len(case.units)  # GPT-2's units have one member each
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("count", [1, 6, 7, 12])
@pytest.mark.parametrize("side", ["input", "output"])
def test_projected_weight_is_the_same_on_both_routes(make_unit, side, count):
    """Few directions are subtracted, many are left: the product with a dense P decides."""
    torch.manual_seed(count)
    q = torch.linalg.qr(torch.randn(13, 13, dtype=torch.float64)).Q
    unit = make_unit(side, 13, (5,))
    weight = torch.randn(*((5, 13) if side == "input" else (13, 5)))
    p = torch.eye(13, dtype=torch.float64) - q[:, 13 - count :] @ q[:, 13 - count :].T
    expected = weight.double() @ p if side == "input" else p @ weight.double()
    assert (projected_weight(weight, q, count, unit) - expected).abs().max() <= 1e-13


@pytest.mark.parametrize(
    ("dimension", "points", "counts"),
    [
        (48, 8, (6, 12, 18, 24, 30, 36, 42)),
        (10, 8, (1, 2, 4, 5, 6, 8, 9)),  # round(1.25), (2.5), (3.75), (5), (6.25), (7.5), (8.75)
        (3, 8, (1, 2)),  # duplicates, 0 and D left out
        (1, 8, ()),
        (48, 1, ()),
    ],
)
def test_grid_counts(make_unit, dimension, points, counts):
    assert removal_counts(make_unit("input", dimension, (dimension,)), points) == counts


def test_only_useful_counts_are_measured(make_unit):
    unit = make_unit("input", 48, (48,))  # a square layer breaks even at half
    assert unit.break_even == 25
    assert counts_to_measure(unit, (6, 12, 18, 24, 30, 36, 42)) == (24, 30, 36, 42)
    assert counts_to_measure(unit, (30, 36)) == (30, 36)
    assert counts_to_measure(unit, (6, 12)) == (12,)
    tied = make_unit("input", 48, (48, 48, 48))
    assert tied.break_even == 13
    assert counts_to_measure(tied, (6, 12, 18)) == (12, 18)
