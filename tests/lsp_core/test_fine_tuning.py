"""Training a compressed model's factors: gradients of all, with and without checkpointed activations, by a trainer."""

import datasets
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, Trainer, TrainingArguments

from lsp_core.modeling_lsp import Shared
from tests.lsp_core.products import factors, outputs, product, trainable


def gradients(model, case):
    model.zero_grad()
    torch.manual_seed(0)  # for dropout
    result = model(**case.inputs.arguments(case.examples, model))
    output = result.last_hidden_state if case.family.kind == "encoder" else result.logits
    output.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2", "t5", "bert"])
def test_gradients_reach_every_factor_and_are_the_same_with_checkpointed_activations(family, reentrant):
    model, case = product(family)
    trainable(model).train()
    model.enable_input_require_grads()
    plain = gradients(model, case)
    assert {id(p) for factor in factors(model) for p in factor.parameters()} == {
        id(model.get_parameter(name)) for name in plain
    }
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    again = gradients(model, case)
    assert all(torch.equal(gradient, again[name]) for name, gradient in plain.items())
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_the_latent_is_computed_twice_where_activations_are_checkpointed(monkeypatch):
    """Once forward and once when the block is computed again; nothing is held in between or after."""
    model, case = product("llama")
    trainable(model).train()
    model.gradient_checkpointing_enable()
    made, plain = [], F.linear

    def linear(x, weight, bias=None):
        made.append(id(weight))
        return plain(x, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    loss = model(input_ids=case.examples, labels=case.examples).loss
    shared = [factor for factor in factors(model) if isinstance(factor, Shared)]
    assert len(shared) == 6
    assert all(made.count(id(factor.weight)) == 1 for factor in shared)
    assert all(factor._once._held is None for factor in shared)
    loss.backward()
    assert all(made.count(id(factor.weight)) == 2 for factor in shared)
    assert all(factor._once._held is None for factor in shared)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trainer_lowers_the_loss_and_resumes(tmp_path, checkpointing):
    """The trainer finds columns and labels by the signature of ``forward``, and leaves others out."""
    model, case = product("llama")
    trainable(model)
    rows = {
        "input_ids": case.examples.tolist(),
        "attention_mask": torch.ones_like(case.examples).tolist(),
        "labels": case.examples.tolist(),
        "beside": ["x"] * len(case.examples),
    }
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        gradient_checkpointing=checkpointing,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="epoch",
    )
    data = datasets.Dataset.from_dict(rows)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(outputs(case, saved, saved), outputs(case, model.eval(), model))
    resumed = Trainer(trainable(product("llama")[0]), arguments, train_dataset=data)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    other = resumed.model.eval()
    assert torch.equal(outputs(case, other, other), outputs(case, model, model))


@pytest.mark.parametrize("says", [None, False])
@pytest.mark.parametrize("family", ["llama", "t5", "vit"])
def test_a_trainer_averages_losses_as_for_the_base_model(tmp_path, monkeypatch, family, says):
    """Some models say themselves whether they take the number of items; of the others the signature is asked."""
    if says is not None:
        base = type(product(family)[1].model)
        monkeypatch.setattr(base, "accepts_loss_kwargs", says, raising=False)
    model, case = product(family)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    ours, theirs = Trainer(model, arguments), Trainer(case.copy_model(), arguments)
    assert ours.model_accepts_loss_kwargs == theirs.model_accepts_loss_kwargs == (says is None)
    assert ours.label_names == theirs.label_names == ["labels"]


def test_an_image_classifier_gives_the_loss_of_its_labels(tmp_path):
    model, case = product("vit")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    arguments = case.inputs.arguments(case.examples, model)
    loss = loaded(**arguments, labels=case.labels).loss
    expected = F.cross_entropy(outputs(case, model, model), case.labels)
    assert (loss - expected).abs() <= 4 * torch.finfo(torch.float32).eps * expected
