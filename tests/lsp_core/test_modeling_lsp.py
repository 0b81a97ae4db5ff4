"""The latent of a tied group: computed once a forward pass in eager mode, kept no longer, never stale."""

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lsp_core.merging import merge_model
from lsp_core.modeling_lsp import FactoredLinear, Once, Shared, factored, linear_of, replace_module


def group(readers: int, width: int = 7, rank: int = 3) -> tuple[Shared, list[FactoredLinear]]:
    torch.manual_seed(0)
    shared = Shared(linear_of(torch.randn(rank, width, dtype=torch.float64)), readers=readers)
    own = [torch.randn(4 + i, rank, dtype=torch.float64) for i in range(readers)]
    biases = [None, *(torch.randn(4 + i, dtype=torch.float64) for i in range(1, readers))]
    return shared, [factored(weight, {"input": shared}, bias) for weight, bias in zip(own, biases, strict=True)]


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7)])
def test_is_the_product_of_its_factors(readers, shape):
    shared, layers = group(readers)
    x = torch.randn(*shape, dtype=torch.float64)
    for layer in layers:
        weight = layer.output_factor.weight @ shared.weight
        assert (layer(x) - F.linear(x, weight, layer.bias)).abs().max() <= 1e-13  # two sums of a few terms, reordered
        assert (layer.in_features, layer.ranks["input"], layer.out_features) == (7, 3, weight.shape[0])


def test_factors_are_frozen():
    _, layers = group(2)
    assert not any(parameter.requires_grad for layer in layers for parameter in layer.parameters())


@pytest.fixture
def products(monkeypatch):
    """The weights of the linear products made, in order."""
    made: list[torch.Tensor] = []
    plain = F.linear

    def linear(x, weight, bias=None):
        made.append(weight)
        return plain(x, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    return made


@pytest.mark.parametrize("readers", [2, 3])
def test_latent_is_computed_once_a_pass(products, readers):
    shared, layers = group(readers)
    for _ in range(3):
        x = torch.randn(5, 7, dtype=torch.float64)
        for layer in layers:
            layer(x)
    assert sum(weight is shared.weight for weight in products) == 3


def test_latent_is_computed_once_in_a_merged_model(prepare, products):
    case = prepare("llama")
    merge_model(case.model, case.units, {n: case.bases[n][:, -k:] for n, k in case.removed.items()})
    layers = [m for m in case.model.modules() if isinstance(m, FactoredLinear)]
    factors = {id(factor): factor for layer in layers for factor in (layer.input_factor, layer.output_factor)}.values()
    shared = [factor for factor in factors if isinstance(factor, Shared) and factor._once.readers > 1]
    assert len(shared) == 2 * 3  # Q/K/V and gate/up of every block
    products.clear()
    case.logits()
    for factor in factors:
        assert sum(weight is factor.weight for weight in products) == 1
    assert all(factor._once._held is None for factor in shared)


def test_nothing_is_retained_after_the_last_reader():
    _, layers = group(2)
    x = torch.randn(5, 7, dtype=torch.float64)
    outputs = [layer(x) for layer in layers]
    alive = weakref.ref(x)
    del x, outputs
    gc.collect()
    assert alive() is None


def test_a_skipped_reader_does_not_make_the_latent_stale():
    shared, layers = group(3)
    for seed in range(3):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for layer in layers[: 1 + seed % 2]:  # never all three
            expected = F.linear(x, layer.output_factor.weight @ shared.weight, layer.bias)
            assert (layer(x) - expected).abs().max() <= 1e-13


def test_an_equal_tensor_is_another_tensor():
    """Identity decides, so that a second pass over the same numbers is a pass of its own."""
    calls = []
    once = Once(2)
    x = torch.ones(3)

    def double(t):
        calls.append(t)
        return 2 * t

    once(double, x)
    once(double, x.clone())
    assert len(calls) == 2


def test_another_thread_may_read_between_any_two_lines():
    """Threads that share a model share what holds its latents: none gets the latent of another's tensor."""
    once, x, other = Once(2), torch.zeros(3), torch.ones(3)

    def interrupt(frame, event, _):
        if frame.f_code is Once.__call__.__code__ and event == "line":
            assert once(torch.neg, other).equal(-other)  # is not traced in its turn
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        results = [once(torch.neg, x) for _ in range(4)]
    finally:
        sys.settrace(before)
    assert all(result.equal(-x) for result in results)


def test_latent_carries_the_gradient_of_all_readers():
    shared, layers = group(3)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    sum(layer(x).square().sum() for layer in layers).backward()
    other = x.detach().clone().requires_grad_()
    sum(
        F.linear(other, layer.output_factor.weight @ shared.weight, layer.bias).square().sum() for layer in layers
    ).backward()
    assert (x.grad - other.grad).abs().max() <= 1e-12 * other.grad.abs().max()


def test_replace_module_reaches_every_name_of_a_layer():
    model = nn.Module()
    layer, other, new = nn.Linear(2, 2), nn.Linear(2, 2), nn.Identity()
    model.a = nn.ModuleList([layer, other])
    model.b, model.c = layer, layer  # two names in one parent, and one in another
    replace_module(model, "a.0", new)
    assert model.a[0] is model.b is model.c is new
    assert model.a[1] is other


def copied_by_pickle(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("copied", [copy.deepcopy, copied_by_pickle])
def test_a_copy_holds_no_latent(copied):
    shared, layers = group(2)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    layers[0]((2 * x).exp())  # of a graph, which cannot be copied
    assert shared._once._held is not None
    other = copied(shared)
    assert (other._once.readers, other._once._held) == (2, None)
    assert torch.equal(other(x), F.linear(x, shared.weight))


def changed_input(shared, x):
    x.mul_(2)


def changed_weight(shared, x):
    with torch.no_grad():
        shared.weight.mul_(2)


def adapted_weight(shared, x):
    with torch.no_grad():
        shared.linear[0].weight.mul_(2)


@pytest.mark.parametrize("change", [changed_input, changed_weight, adapted_weight])
@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_broken_pass_left_is_not_read_after_a_change(change, gradients):
    shared, _ = group(3)
    if change is adapted_weight:
        shared.linear = nn.Sequential(shared.linear)
    x = torch.randn(5, 7, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        before = shared(x).clone()
        assert torch.equal(shared(x), before)
        change(shared, x)
        assert torch.equal(shared(x), 2 * before)  # a power of two: no rounding


def test_a_latent_made_without_gradients_is_made_again_where_they_are_recorded():
    shared, _ = group(2)
    shared.requires_grad_(True)
    x = torch.randn(5, 7, dtype=torch.float64)
    with torch.no_grad():
        assert not shared(x).requires_grad
    assert shared(x).requires_grad


def test_tensors_of_inference_mode_have_no_version():
    shared, layers = group(2)
    with torch.inference_mode():
        x = torch.randn(5, 7, dtype=torch.float64)
        for layer in layers:
            expected = F.linear(x, layer.output_factor.weight @ shared.weight, layer.bias)
            assert (layer(x) - expected).abs().max() <= 1e-13
