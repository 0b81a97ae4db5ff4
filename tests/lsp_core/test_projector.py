"""Both exact forms of the projected layer against explicit dense projectors, forward and gradient of V."""

import pytest
import torch
import torch.nn.functional as F

from lsp_core.projector import Projector, attached
from lsp_core.training import frozen
from lsp_core.vectors import Form, Plan

FAMILIES = ["llama", "opt", "gpt2", "qwen3"]  # input and output ties, biases, Conv1D
# Relative to the largest entry: rounding of a forward and backward pass of a few blocks in float64.
TOLERANCE = 1e-11


def draw_masks(case, drop: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    return {u.name: (torch.rand(len(u.members), case.removed[u.name]) >= drop) for u in case.units}


def load_vectors(projectors, vectors) -> None:
    with torch.no_grad():
        for name, projector in projectors.items():
            projector.v.copy_(vectors[name])


def set_form(projectors, form: str, alpha: float, masks) -> None:
    for name, projector in projectors.items():
        projector.set_form(Plan(form=Form(form), masks=masks[name].unbind(), alpha=alpha))


def dense_oracle(case, oracles, masks, alpha: float, probe):
    """Logits and the gradient of every V by autograd through explicit P and LAPACK's QR."""
    vectors = {name: v.clone().requires_grad_() for name, v in case.perturbed().items() if name in case.removed}
    logits = oracles.logits(case, vectors, masks, alpha)
    (logits * probe).sum().backward()
    return logits.detach(), {name: v.grad for name, v in vectors.items()}


def assert_same(ours, expected) -> None:
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("form", "alpha", "drop"),
    [
        ("activation", 0.3, 0.2),
        ("activation", 1.0, 0.2),
        ("factor", 1.0, 0.2),
        ("factor", 1.0, 0.0),
        ("factor", 1.0, 1.0),
    ],
)
def test_model_and_gradients_against_explicit_projectors(prepare, oracles, family, form, alpha, drop):
    """Micro-batches of uneven sizes leave on the leaves what one batch does."""
    case = prepare(family)
    masks = draw_masks(case, drop)
    probe = torch.randn(*case.tokens.shape, case.model.config.vocab_size, dtype=torch.float64)
    expected, grads = dense_oracle(case, oracles, masks, alpha, probe)
    parts = []
    with attached(case.model, case.units, case.bases, case.removed) as projectors, frozen(case.model):
        load_vectors(projectors, case.perturbed())
        set_form(projectors, form, alpha, masks)
        for rows in torch.arange(len(case.tokens)).split(4):
            logits = case.model(input_ids=case.tokens[rows], use_cache=False).logits
            parts.append(logits.detach())
            (logits * probe[rows]).sum().backward()
        for projector in projectors.values():
            projector.backward()
    assert_same(torch.cat(parts), expected)
    assert projectors.keys() == grads.keys()
    largest = max(g.abs().max() for g in grads.values())
    for name, grad in grads.items():
        if drop == 1.0:  # nothing is removed, so V has no say; what is left of the cancellation is rounding
            ours = projectors[name].v.grad
            assert grad.abs().max() <= 1e-10
            assert ours is None or ours.abs().max() <= 1e-10
        else:
            assert grad.abs().max() > 1e-6 * largest, "the oracle must see this unit"
            assert (projectors[name].v.grad - grad).abs().max() <= 100 * TOLERANCE * largest, name


def test_validation_form_removes_everything(prepare, oracles):
    case = prepare("qwen3")
    expected = oracles.logits(case, case.perturbed(), oracles.all_removed(case), 1.0)
    with attached(case.model, case.units, case.bases, case.removed) as projectors, torch.no_grad():
        load_vectors(projectors, case.perturbed())
        for projector in projectors.values():
            projector.set_form(Plan(form=Form.FACTOR))
        assert_same(case.logits(), expected)
        for projector in projectors.values():
            assert not any(leaf.requires_grad for leaf in projector._leaves)


def test_two_optimizer_steps_on_one_tensor_share_nothing(prepare):
    """A latent of the last step's U, left by readers that were skipped, is not served in the next step."""
    case = prepare("llama")
    unit = case.units[0]
    layers = [case.model.get_submodule(name) for name in unit.members]
    projector = Projector(unit, 20, case.bases[unit.name], layers)
    x = torch.randn(5, unit.dimension, dtype=torch.float64)
    masks = torch.ones(3, 20)
    modulated = Plan(form=Form.ACTIVATION, masks=masks.unbind())
    projector.set_form(modulated)
    projector.apply(0, x)
    with torch.no_grad():
        projector.v.copy_(torch.randn_like(projector.v))
    for plan in (modulated, Plan(form=Form.FACTOR)):
        projector.set_form(plan)
        u = torch.linalg.qr(projector.v.detach()).Q
        expected = F.linear(x - x @ u @ u.T, layers[0].weight)
        assert_same(projector.apply(0, x), expected)


@pytest.mark.parametrize("k", [1, 2, 47])
def test_fewest_and_most_directions(prepare, oracles, k):
    case = prepare("llama")
    unit = case.units[1]
    case.removed = {unit.name: k}
    masks = {unit.name: torch.ones(1, k)}
    probe = torch.randn(*case.tokens.shape, case.model.config.vocab_size, dtype=torch.float64)
    expected, grads = dense_oracle(case, oracles, masks, 1.0, probe)
    with attached(case.model, case.units, case.bases, case.removed) as projectors, frozen(case.model):
        assert list(projectors) == [unit.name]
        load_vectors(projectors, case.perturbed())
        set_form(projectors, "factor", 1.0, masks)
        logits = case.model(input_ids=case.tokens, use_cache=False).logits
        (logits * probe).sum().backward()
        projectors[unit.name].backward()
    assert_same(logits.detach(), expected)
    assert_same(projectors[unit.name].v.grad, grads[unit.name])


@pytest.mark.parametrize("k", [0, 48, 49, -1])
def test_counts_without_a_projector_are_an_error(prepare, k):
    case = prepare("llama")
    unit = case.units[1]
    with pytest.raises(ValueError, match=rf"{unit.name} cannot remove {k} of 48"):
        Projector(unit, k, case.bases[unit.name], [case.model.get_submodule(unit.members[0])])


def test_starts_at_the_last_columns_in_at_least_float32(make_model, prepare):
    case = prepare("llama")
    model = make_model("llama", torch.bfloat16)
    with attached(model, case.units, case.bases, case.removed) as projectors:
        for name, projector in projectors.items():
            assert projector.v.dtype == torch.float32
            assert torch.equal(projector.v.detach(), case.bases[name][:, -case.removed[name] :].float())


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("k", [1, 2, 28])
def test_penalty_against_a_double_loop(prepare, scale, k):
    """At a perturbed V: at an orthonormal one the gradient is the sign of rounding."""
    case = prepare("llama")
    unit = case.units[1]
    projector = Projector(unit, k, case.bases[unit.name], [case.model.get_submodule(unit.members[0])])
    start = scale * (projector.v.detach() + 0.1 * torch.randn_like(projector.v))
    with torch.no_grad():
        projector.v.copy_(start)
    penalty = projector.vectors.penalty()
    v = start.clone().requires_grad_()
    pairs = [(v[:, i] @ v[:, j]).abs() for i in range(k) for j in range(k) if i != j]
    expected = sum(pairs) / (k * (k - 1)) if pairs else torch.zeros(())
    assert (penalty - expected).abs() <= 1e-13 * scale**2
    penalty.backward()
    (expected + 0.0 * v.sum()).backward()
    assert_same(projector.v.grad, v.grad)


def test_units_that_remove_nothing_are_not_touched(prepare):
    case = prepare("qwen3")
    dense = [unit.name for unit in case.units[::2]]
    case.removed |= dict.fromkeys(dense[:2], 0)
    for name in dense[2:]:
        del case.removed[name]
    before = {name: case.model.get_submodule(name) for name in _members(case, dense)}
    with attached(case.model, case.units, case.bases, case.removed) as projectors:
        assert projectors.keys() == case.by_name.keys() - set(dense)
        assert all(case.model.get_submodule(name) is layer for name, layer in before.items())


def _members(case, names):
    return [member for name in names for member in case.by_name[name].members]


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_the_model_as_it_was(prepare, fails):
    case = prepare("opt")
    before = dict(case.model.named_modules())
    state = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    logits = case.logits()
    try:
        with attached(case.model, case.units, case.bases, case.removed) as projectors, frozen(case.model):
            assert torch.equal(case.logits(), logits), "attached projectors are dense at first"
            set_form(projectors, "factor", 1.0, draw_masks(case, 0.2))
            case.model(input_ids=case.tokens).logits.sum().backward()
            for projector in projectors.values():
                projector.backward()
                assert projector.form is Form.DENSE
            assert torch.equal(case.logits(), logits)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert dict(case.model.named_modules()) == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in case.model.state_dict().items())
    assert torch.equal(case.logits(), logits)
    assert all(p.grad is None and p.requires_grad for p in case.model.parameters())
