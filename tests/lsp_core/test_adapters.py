"""LoRA on the factors of a compressed model: a shared factor's adapter is every member's, and computed once."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from lsp_core.modeling_lsp import Shared
from tests.lsp_core.products import factored_layers, factors, outputs, product, save

TARGETS = {
    "own output factors": ["output_factor"],
    "shared input factors": ["input_factor.linear"],
    "shared factors by a pattern": r".*\.input_factor\.linear",
    "all": "all-linear",
}


def adapted(model, targets="all-linear", **options):
    """Returns the model with adapters of rank 4 and weight 4."""
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, **options))


def train(model, ids, steps):
    """Returns the loss before each of some steps of gradient descent, and after the last."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in parameters)
        optimizer.step()
    return [*losses, model(input_ids=ids, labels=ids).loss.item()]


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_adapters_are_trained_saved_loaded_and_merged(tmp_path, targets):
    model, case = save(tmp_path / "base", "llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = outputs(case, base, base)
    with_adapters = adapted(base, targets, task_type="CAUSAL_LM")
    assert torch.equal(outputs(case, with_adapters, model), before)
    losses = train(with_adapters.train(), case.examples, 3)
    assert losses == sorted(losses, reverse=True)
    assert losses[1] < losses[0] - 1e-3
    after = outputs(case, with_adapters.eval(), model)
    with with_adapters.disable_adapter():
        assert torch.equal(outputs(case, with_adapters, model), before)

    with_adapters.save_pretrained(tmp_path / "adapter")
    prompt = {"input_ids": case.examples[:2, :5], "max_new_tokens": 4, "do_sample": False}
    loaded = [
        PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        ),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
    ]
    for each in loaded:
        assert torch.equal(outputs(case, each, model), after)
        assert torch.equal(each.generate(**prompt), with_adapters.generate(**prompt))

    exact = outputs(case, copy.deepcopy(with_adapters).double(), model)
    merged = copy.deepcopy(with_adapters).double().merge_and_unload()
    assert type(merged) is type(model)
    # sums of some hundred terms in another order, in float64, through three blocks that enlarge an error a little each
    assert (outputs(case, merged, model) - exact).abs().max() <= 1e4 * torch.finfo(
        torch.float64
    ).eps * exact.abs().max()
    merged = with_adapters.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(outputs(case, again, again), outputs(case, merged, merged))


def test_loading_an_adapter_finds_nothing_missing(tmp_path, recwarn):
    model, _ = save(tmp_path / "base", "llama")
    adapted(model).save_pretrained(tmp_path / "adapter")
    PeftModel.from_pretrained(product("llama")[0], tmp_path / "adapter")
    assert not [warning for warning in recwarn if "missing" in str(warning.message)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2", "t5"])
def test_every_factor_gets_one_adapter_which_all_its_members_see(family):
    model, case = product(family)
    plain = factors(model)
    with_adapters = adapted(model.double(), init_lora_weights=False).eval()
    adapters = [
        name for name, module in with_adapters.named_modules() if hasattr(module, "lora_A") and "factor" in name
    ]
    assert len(adapters) == len(plain)

    def whole(factor):  # (out, in) of a factor with its adapter, of weight 4
        layer = factor.linear if isinstance(factor, Shared) else factor
        return layer.base_layer.weight + 4 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight

    shared = 0
    for layer in factored_layers(with_adapters).values():
        shared += isinstance(layer.input_factor, Shared) + isinstance(layer.output_factor, Shared)
        x = torch.randn(5, layer.in_features, dtype=torch.float64)
        with torch.no_grad():
            expected = F.linear(x, whole(layer.output_factor) @ whole(layer.input_factor), layer.bias)
            assert (layer(x) - expected).abs().max() <= 1e-12 * expected.abs().max()
        for factor in (layer.input_factor, layer.output_factor):
            if isinstance(factor, Shared):
                factor._once._held = None  # the other members did not read this x
    assert shared > 0 or family == "gpt2"
    assert outputs(case, with_adapters, model).isfinite().all()


def test_the_latent_of_a_group_is_computed_once_with_its_adapter(monkeypatch):
    model, case = product("llama")
    with_adapters = adapted(model, init_lora_weights=False).eval()
    made, plain = [], F.linear

    def linear(x, weight, bias=None):
        made.append(id(weight))
        return plain(x, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    outputs(case, with_adapters, model)
    for name, parameter in with_adapters.named_parameters():
        if "factor" in name and parameter.ndim == 2:
            assert made.count(id(parameter)) == 1, name


def test_adapters_with_checkpointed_activations_get_the_same_gradients():
    model, case = product("llama")
    with_adapters = adapted(model, init_lora_weights=False).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            with_adapters.gradient_checkpointing_enable()
        with_adapters.zero_grad()
        with_adapters(input_ids=case.examples, labels=case.examples).loss.backward()
        gradients.append({name: p.grad for name, p in with_adapters.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.parametrize("tuned", [PromptTuningConfig, PrefixTuningConfig])
def test_generate_continues_a_tuned_prompt(tuned):
    """What the first step of ``generate`` gives is what ``forward`` gives with the prompt, not without it."""
    model, case = product("llama")
    sizes = {"token_dim": model.config.hidden_size, "num_attention_heads": model.config.num_attention_heads}
    if tuned is PrefixTuningConfig:  # keys and values
        heads = model.config.num_key_value_heads
        sizes = {"token_dim": heads * model.config.head_dim, "num_attention_heads": heads}
    with_prompt = get_peft_model(model, tuned(task_type="CAUSAL_LM", num_virtual_tokens=4, **sizes)).eval()
    torch.nn.init.normal_(with_prompt.prompt_encoder["default"].embedding.weight, std=3)
    prompt = {"input_ids": case.examples[:2, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        expected, without = with_prompt(**prompt).logits[:, -1], model(**prompt).logits[:, -1]
    continued = with_prompt.generate(**prompt, **options).logits[0]
    # a few blocks of sums of some tens of terms, in another order
    slack = 64 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (continued - expected).abs().max() <= slack < (without - expected).abs().max() / 100
    assert (model.generate(**prompt, **options).logits[0] - without).abs().max() <= slack


def test_the_vocabulary_can_grow_under_adapters():
    model, case = product("llama")
    with_adapters = adapted(model)
    with_adapters.resize_token_embeddings(120)
    assert outputs(case, with_adapters, model).shape[-1] == 120


def test_transformers_own_way_to_add_an_adapter(tmp_path):
    model, case = product("llama")
    before = outputs(case, model, model)
    model.add_adapter(LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    after = outputs(case, model, model)
    assert not torch.equal(after, before)
    model.save_pretrained(tmp_path)
    other, _ = product("llama")
    other.load_adapter(str(tmp_path))
    assert torch.equal(outputs(case, other, other), after)
