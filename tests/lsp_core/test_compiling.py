"""Compressed models under ``torch.compile``: one graph, each factor once in it, the same numbers, nothing left over."""

import copy

import pytest
import torch
from torch import nn
from transformers import CompileConfig

from lsp_core.modeling_lsp import Shared
from tests.lsp_core.products import factored_layers, outputs, product


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Runs graphs as they are and keeps them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def weights(self):
        """Returns for each linear product of the last graph what stands for its weight."""
        nodes = self.graphs[-1].graph.nodes
        return [node.args[1] for node in nodes if node.op == "call_function" and "linear" in str(node.target)]


def held(model):
    return [factor for factor in model.modules() if isinstance(factor, Shared) and factor._once._held is not None]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2", "t5", "vit", "bert"])
def test_one_graph_with_every_factor_once_equals_eager(family):
    model, case = product(family)
    backend = Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(outputs(case, compiled, model), outputs(case, model, model))
    linears = {id(layer) for layer in model.modules() if isinstance(layer, nn.Linear)}
    weights = backend.weights()
    assert len(set(weights)) == len(linears)
    # a latent is made once for all that read it; a shared output factor expands one latent for each that holds it
    ends = [layer.output_factor for layer in factored_layers(model).values()]
    assert len(weights) == len(linears) + len(ends) - len({id(factor) for factor in ends})
    assert not held(model)
    with torch.no_grad():  # the second call is of the same shape, with other weights: no graph more, no stale latent
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert torch.equal(outputs(case, compiled, model), outputs(case, model, model))
    assert len(backend.graphs) == 1


def broken_off(model, inputs):
    """Breaks off a pass after the first of the three readers of a latent in the second block."""
    layers = factored_layers(model)
    name = next(name for name in layers if ".1." in name and name.endswith("k_proj"))

    def fail(*_):
        raise RuntimeError("broken off")

    handle = layers[name].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"), torch.no_grad():
        model(inputs)
    handle.remove()
    assert len(held(model)) == 1


@pytest.mark.parametrize("compiling", [False, True])
def test_a_pass_that_was_broken_off_leaves_nothing_stale(compiling):
    model, case = product("llama")
    inputs = case.examples
    broken_off(model, inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    backend = Backend()
    call = torch.compile(model, fullgraph=True, backend=backend) if compiling else model
    fresh = product("llama")[0]
    fresh.load_state_dict(model.state_dict())
    for _ in range(3):
        assert torch.equal(outputs(case, call, model), outputs(case, fresh, fresh))
    assert not held(model)
    assert len(backend.graphs) <= 2  # that with a latent held, and that without


def test_generate_with_a_static_cache_and_a_compiled_step():
    model, case = product("llama")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    prompt = {"input_ids": case.examples[:2, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    expected = model.generate(**prompt, **options)
    backend = Backend()
    stepping = copy.deepcopy(model)
    stepping.model.forward = torch.compile(stepping.model.forward, fullgraph=True, backend=backend)
    assert torch.equal(stepping.generate(**prompt, **options), expected)
    made = len(backend.graphs)
    assert made >= 1
    assert torch.equal(stepping.generate(**prompt, **options), expected)
    assert len(backend.graphs) == made


def test_generate_compiles_its_steps_once():
    model, case = product("llama")
    prompt = {"input_ids": case.examples[:2, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(**prompt, **options)
    backend = Backend()
    compiling = CompileConfig(fullgraph=True, mode=None, backend=lambda *given: backend(*given))  # not copied
    compiling._compile_all_devices = True
    for _ in range(2):
        assert torch.equal(model.generate(**prompt, **options, compile_config=compiling), expected)
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_gradients_through_a_compiled_model():
    model, case = product("llama")
    model.requires_grad_(True)
    gradients = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        call(input_ids=case.examples, labels=case.examples).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        # sums of some hundred terms in another order, through three blocks
        slack = 1e3 * torch.finfo(torch.float32).eps * gradient.abs().max()
        assert (gradients[1][name] - gradient).abs().max() <= slack, name


@pytest.mark.slow
def test_inductor_equals_eager():
    model, case = product("llama")
    compiled = torch.compile(model, fullgraph=True)
    expected = outputs(case, model, model)
    # every logit carries some tens of roundings in another order, relative to the largest
    slack = 64 * torch.finfo(torch.float32).eps * expected.abs().max()
    for _ in range(2):
        assert (outputs(case, compiled, model) - expected).abs().max() <= slack
    assert not held(model)
