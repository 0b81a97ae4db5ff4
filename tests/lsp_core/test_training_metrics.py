"""What training validates on, by kind of model and labels, and which epoch that makes the best."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from lsp_core.merging import merge_model
from lsp_core.projector import attached
from lsp_core.training import Trainer, frozen, train_projectors
from lsp_core.training_settings import TrainingSettings, is_better
from lsp_core.units import find_blocks
from tests.contract.cases import prepare

SETTINGS = TrainingSettings(learning_rate=1e-3, epochs=1, batch_sequences=4, micro_batch=3)
EPS = torch.finfo(torch.float32).eps


def features(model, case) -> Tensor:  # -> (N, P, D), float64
    """The last block's output, by a hook of its own."""
    caught = []
    handle = find_blocks(model)[-1].register_forward_hook(lambda _, __, output: caught.append(output))
    case.outputs(model)
    handle.remove()
    output = caught[0]
    return (output[0] if isinstance(output, tuple) else output).double()


def initially(case, **options):
    """What training starts from: its metric, its first record, and the initialization merged."""
    model = case.copy_model()
    result = train_projectors(
        model,
        case.units,
        case.bases,
        case.removed,
        case.examples,
        case.examples,
        SETTINGS,
        inputs=case.inputs,
        **options,
    )
    merged = case.copy_model()
    merge_model(merged, case.units, {n: case.bases[n][:, -k:] for n, k in case.removed.items()})
    return result.metric, result.history[0], merged


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_without_labels_the_kl_of_the_features_is_the_metric(family):
    case = prepare(family, "float32")
    metric, record, merged = initially(case)
    log_p, log_q = (features(model, case).log_softmax(-1) for model in (case.model, merged))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)  # (N, P)
    kept = case.inputs.kept(case.examples)
    expected = (kl if kept is None else kl[kept]).mean().item()
    assert metric == "kl"
    assert record.keys() == {"epoch", "validation"}
    # the two forms of the projected layers differ by roundings of the features, which the gradient of the KL carries
    assert record["validation"] == pytest.approx(expected, rel=1e-3, abs=64 * EPS)
    assert expected > 1e3 * EPS


def test_with_labels_the_accuracy_of_a_classifier_is_the_metric():
    case = prepare("vit", "float32")
    with torch.no_grad():
        told = case.outputs(case.model).argmax(-1)
    metric, record, merged = initially(case, validation_labels=told)
    with torch.no_grad():
        right = (case.outputs(merged).argmax(-1) == told).double().mean().item()
    assert metric == "accuracy"
    assert record["validation"] == right
    assert record["validation_loss"] > 0


@pytest.mark.parametrize(
    ("metric", "one", "other", "better"),
    [
        ("perplexity", {"validation": 8.0}, {"validation": 9.0}, True),
        ("kl", {"validation": 0.1}, {"validation": 0.1}, False),
        ("accuracy", {"validation": 0.9, "validation_loss": 2.0}, {"validation": 0.8, "validation_loss": 1.0}, True),
        ("accuracy", {"validation": 0.9, "validation_loss": 1.0}, {"validation": 0.9, "validation_loss": 2.0}, True),
        ("accuracy", {"validation": 0.9, "validation_loss": 2.0}, {"validation": 0.9, "validation_loss": 2.0}, False),
        ("accuracy", {"validation": 0.8, "validation_loss": 0.0}, {"validation": 0.9, "validation_loss": 2.0}, False),
    ],
)
def test_the_better_epoch(metric, one, other, better):
    assert is_better(one, other, metric) is better


def test_an_epoch_draws_some_examples_and_another_draws_others():
    case = prepare("llama", "float32")
    settings = dataclasses.replace(SETTINGS, epochs=6, epoch_sequences=5)
    with attached(copy.deepcopy(case.model), case.units, case.bases, case.removed) as projectors, frozen(case.model):
        trainer = Trainer(case.model, projectors, case.examples, case.examples, settings)
    assert trainer.steps_per_epoch == 2  # of 4 and of 1
    rows_of = trainer.draws.rows
    epochs = [torch.cat([rows_of(2 * epoch), rows_of(2 * epoch + 1)]).tolist() for epoch in range(6)]
    assert all(len(set(rows)) == 5 for rows in epochs)
    assert len({tuple(sorted(rows)) for rows in epochs}) > 1
    assert {row for rows in epochs for row in rows} == set(range(len(case.examples)))
