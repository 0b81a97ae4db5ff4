"""The diagonal Fisher against a gradient of each sequence's loss on full logits, and its cost against the definition.

Float64: both are sums of the same products in another order, so 1e-10 relative holds for squares of gradients.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from lsp_core.discovery import discover_units
from lsp_core.fisher import Fisher
from lsp_core.gram import NonFiniteError
from lsp_core.inputs import inputs_of
from lsp_core.sensitivity import projected_weight
from lsp_core.units import weight_of

TOLERANCE = 1e-10


def naive_diagonal(case):
    """Mean over sequences of the squared gradient of the summed next-token loss, by autograd on full logits."""
    model = case.model
    names = [f"{member}.weight" for unit in case.units for member in unit.members]
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameters[name]) for name in names}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    for ids in case.tokens:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, ids[1:], reduction="sum")
        gradients = torch.autograd.grad(loss, [parameters[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            total[name] += gradient**2 / len(case.tokens)
    return total


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
def test_the_diagonal_is_the_mean_square_of_the_sequences_gradients(prepare, family):
    case = prepare(family)
    fisher = Fisher(case.model, case.units, case.bases, case.tokens)
    expected = naive_diagonal(case)
    assert set(fisher.diagonal) == {name.removesuffix(".weight") for name in expected}
    for name, diagonal in fisher.diagonal.items():
        wanted = expected[f"{name}.weight"]
        assert diagonal.shape == wanted.shape
        assert wanted.max() > 0
        assert (diagonal - wanted).abs().max() <= TOLERANCE * wanted.max()
    assert fisher.predictions == pytest.approx(case.tokens.shape[1] - 1, rel=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_cost_is_half_the_weighted_change_a_prediction(prepare, family):
    case = prepare(family)
    fisher = Fisher(case.model, case.units, case.bases, case.tokens)
    expected = naive_diagonal(case)
    for unit in case.units:
        for count in (1, unit.dimension // 2, unit.dimension - 1):
            total = 0.0
            for member in unit.members:
                layer = case.model.get_submodule(member)
                weight = weight_of(layer).detach()
                change = weight - projected_weight(weight, case.bases[unit.name], count, unit)
                change = change if isinstance(layer, nn.Linear) else change.T
                total += (expected[f"{member}.weight"] * change**2).sum().item() / 2
            assert fisher.measure(unit.name, count) == pytest.approx(total / (case.tokens.shape[1] - 1), rel=1e-9)


def test_a_small_change_costs_what_the_quadratic_form_of_true_gradients_says(prepare):
    """One weight moved: the mean square change of the sequences' losses is F times the square of the step."""
    case = prepare("llama")
    fisher = Fisher(case.model, case.units, case.bases, case.tokens)
    member = case.units[0].members[0]
    weight, step = case.model.get_submodule(member).weight, 1e-3

    @torch.no_grad()
    def losses():
        logits = case.model(input_ids=case.tokens, use_cache=False).logits[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1), case.tokens[:, 1:].flatten(), reduction="none")
        return each.view(len(case.tokens), -1).sum(1)

    with torch.no_grad():
        weight[2, 3] += step
        above = losses()
        weight[2, 3] -= 2 * step
        below = losses()
    square = ((above - below) / (2 * step)).square().mean().item()
    # the norms compute in float32: losses of 80 are good to 1e-6, so their slopes, of 0.3, to 1e-3 in either direction
    assert fisher.diagonal[member][2, 3].item() == pytest.approx(square, rel=1e-2)


def test_the_model_is_left_as_it_was(prepare):
    case = prepare("llama")
    first, *others = case.model.parameters()
    first.requires_grad_(False)
    case.model.train()
    Fisher(case.model, case.units, case.bases, case.tokens)
    assert case.model.training
    assert not first.requires_grad
    assert all(parameter.requires_grad for parameter in others)
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in case.model.parameters())


def test_half_precision_sums_in_float32(prepare):
    case = prepare("llama")
    exact = Fisher(case.model, case.units, case.bases, case.tokens)
    half = Fisher(case.model.to(torch.bfloat16), case.units, case.bases, case.tokens)
    for name, diagonal in half.diagonal.items():
        assert diagonal.dtype == torch.float32
        assert diagonal.sum().item() == pytest.approx(exact.diagonal[name].sum().item(), rel=0.5)  # 8 bits, 3 blocks


def test_a_loss_that_is_not_finite_names_its_sequence(prepare):
    case = prepare("llama")
    with torch.no_grad():
        case.model.get_input_embeddings().weight[100] = torch.inf
    case.tokens[case.tokens == 100] = 3
    case.tokens[4, 5] = 100
    with pytest.raises(NonFiniteError, match="sequence 4 has a loss of nan"):
        Fisher(case.model, case.units, case.bases, case.tokens)


def test_progress_counts_sequences(prepare):
    case = prepare("gpt2")
    seen = []
    Fisher(case.model, case.units, case.bases, case.tokens, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]


def small(family):
    """A random model that predicts no next token of its input, examples for it, and what it gives: logits or features.

    The last is a function of model and example -> (n, D), in the model's dtype.
    """
    torch.manual_seed(0)
    widths = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 36}
    draw = torch.Generator().manual_seed(1)
    if family == "vit":
        config = ViTConfig(**widths, image_size=8, patch_size=4, num_labels=5)
        model = ViTForImageClassification(config).double().eval()
        pixels = torch.randint(0, 256, (4, 3, 8, 8), generator=draw, dtype=torch.uint8)
        return model, pixels, lambda model, image: model(pixel_values=image.double() / 255).logits
    model = BertModel(BertConfig(**widths, vocab_size=31, max_position_embeddings=16), add_pooling_layer=False).double()
    ids = torch.randint(1, 31, (4, 9), generator=draw)
    ids[1, 6:] = ids[3, 2:] = 0  # padding

    def features(model, ids):
        kept = ids != 0
        return model(input_ids=ids, attention_mask=kept.long()).last_hidden_state[kept]

    return model.eval(), ids, features


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_without_a_next_token_labels_are_drawn_from_the_model(family):
    """The same draws, by the same generator, one example after the other; padding draws none."""
    model, examples, gives = small(family)
    units = discover_units(model)
    bases = {unit.name: torch.eye(unit.dimension, dtype=torch.float64) for unit in units}
    weights = {member: model.get_submodule(member).weight for unit in units for member in unit.members}
    fisher = Fisher(model, units, bases, examples, inputs=inputs_of(model), seed=3)
    generator = torch.Generator().manual_seed(3)
    expected = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    count = 0
    for example in examples.split(1):
        logits = gives(model, example)
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            expected[name] += gradient**2 / len(examples)
        count += len(labels)
    assert fisher.predictions == pytest.approx(count / len(examples), rel=1e-12)
    for name, diagonal in fisher.diagonal.items():
        assert expected[name].max() > 0
        assert (diagonal - expected[name]).abs().max() <= TOLERANCE * expected[name].max()
    other = Fisher(model, units, bases, examples, inputs=inputs_of(model), seed=4)
    assert any(not torch.equal(other.diagonal[name], fisher.diagonal[name]) for name in weights)


def test_an_encoder_decoder_predicts_its_decoders_half():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=31,
        d_model=24,
        d_kv=12,
        d_ff=36,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config).double().eval()
    ids = torch.randint(1, 31, (3, 10), generator=torch.Generator().manual_seed(1))
    units = discover_units(model)
    bases = {unit.name: torch.eye(unit.dimension, dtype=torch.float64) for unit in units}
    fisher = Fisher(model, units, bases, ids)
    weights = {member: model.get_submodule(member).weight for unit in units for member in unit.members}
    expected = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for row in ids.split(1):
        loss = 5 * model(input_ids=row[:, :5], labels=row[:, 5:]).loss  # its mean over five tokens
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            expected[name] += gradient**2 / len(ids)
    assert fisher.predictions == 5
    for name, diagonal in fisher.diagonal.items():
        assert (diagonal - expected[name]).abs().max() <= TOLERANCE * expected[name].max()
