"""Linear probes against a general optimizer, and features against what the models themselves hand out."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from lsp_core.gram import NonFiniteError
from lsp_core.inputs import inputs_of
from tasks import probe
from tasks.probe import class_head, embed, linear_probe

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PIXELS = SMALL | {"image_size": 8, "patch_size": 4, "num_labels": 5}


def clusters(seed: int, count: int, spread: float) -> tuple[Tensor, Tensor]:
    """Returns points of the plane around three corners, the second axis a hundred times as long as the first."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    points = corners[labels] + spread * torch.randn(count, 2, generator=generator)
    return points * torch.tensor([1.0, 100.0]) + 7, labels


def oracle(train: Tensor, labels: Tensor, test: Tensor) -> np.ndarray:
    """Returns the test points' classes by minimizing the penalized cross-entropy as it is written, by BFGS."""
    mean, std = train.double().mean(0), train.double().std(0, correction=0)
    x, y = ((train.double() - mean) / std).numpy(), labels.numpy()

    def loss(flat: np.ndarray) -> float:
        W, b = flat[:6].reshape(3, 2), flat[6:]
        logits = x @ W.T + b
        return float((logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]).sum() + (W**2).sum() / 2)

    found = minimize(loss, np.zeros(9), method="BFGS", options={"gtol": 1e-4}).x
    points = ((test.double() - mean) / std).numpy()
    return np.asarray((points @ found[:6].reshape(3, 2).T + found[6:]).argmax(1))


@pytest.mark.parametrize("spread", [0.3, 0.8])
def test_accuracy_is_that_of_the_penalized_optimum(spread: float) -> None:
    train, test = clusters(0, 60, spread), clusters(1, 4000, spread)
    found = linear_probe(*train, *test)
    expected = float(np.mean(oracle(*train, test[0]) == test[1].numpy()))
    assert found.converged
    # both optima are within 1e-3 of the true one; so near the borders lie some points of 4000
    assert found.accuracy == pytest.approx(expected, abs=5 / 4000)
    assert 0.4 < found.accuracy < 0.97


def test_what_is_separable_is_separated() -> None:
    assert linear_probe(*clusters(0, 90, 0.02), *clusters(1, 500, 0.02)).accuracy == 1.0


def test_a_probe_repeats_itself_and_learns_nothing_from_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(1200, 3, generator=generator), torch.randint(2, (1200,), generator=generator)
    halves = features[:600], labels[:600], features[600:], labels[600:]
    found = linear_probe(*halves)
    assert found == linear_probe(*halves)
    assert abs(found.accuracy - 0.5) < 5 * 0.5 / 600**0.5  # five standard deviations


def test_a_class_that_only_the_test_set_has_is_told_wrong() -> None:
    features, labels = clusters(0, 90, 0.02)
    assert linear_probe(features[labels < 2], labels[labels < 2], features, labels).accuracy == pytest.approx(
        float((labels < 2).double().mean())
    )


def test_a_feature_that_never_changes_is_no_trouble() -> None:
    (train, labels), (test, expected) = clusters(0, 90, 0.02), clusters(1, 90, 0.02)
    constant = torch.full((90, 1), 3.0)
    assert linear_probe(torch.cat([train, constant], 1), labels, torch.cat([test, constant], 1), expected) == (
        linear_probe(train, labels, test, expected)
    )


def test_a_fit_that_is_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ITERATIONS", 1)
    assert not linear_probe(*clusters(0, 60, 0.3), *clusters(1, 60, 0.3)).converged


def test_what_cannot_be_probed() -> None:
    features, labels = clusters(0, 30, 0.3)
    with pytest.raises(ValueError, match="the test set of a linear probe has images without a label"):
        linear_probe(features, labels, features, torch.full_like(labels, -1))
    with pytest.raises(ValueError, match="one class alone"):
        linear_probe(features, torch.zeros_like(labels), features, labels)
    broken = features.clone()
    broken[3, 1] = torch.nan
    with pytest.raises(NonFiniteError, match="the features of the training set"):
        linear_probe(broken, labels, features, labels)


def pixels(count: int) -> Tensor:
    return torch.randint(256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@torch.no_grad()
def test_features_of_a_classifier_are_what_its_head_reads() -> None:
    torch.manual_seed(0)
    for model in (
        ViTForImageClassification(ViTConfig(**PIXELS)).eval(),
        Dinov2ForImageClassification(Dinov2Config(**PIXELS, mlp_ratio=2)).eval(),
    ):
        inputs = inputs_of(model, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
        features = embed(model, pixels(5), inputs, 2)
        head = class_head(model)
        assert head is not None
        logits = model(**inputs.arguments(pixels(5), model)).logits
        tolerance = 64 * torch.finfo(torch.float32).eps * logits.abs().max()  # 16 terms or 32, and other batches
        assert (head(features) - logits).abs().max() <= tolerance
        assert not head._forward_pre_hooks


@torch.no_grad()
def test_features_without_a_head_are_the_mean_over_tokens() -> None:
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**PIXELS), add_pooling_layer=False).eval()
    inputs = inputs_of(model)
    hidden = model(pixel_values=pixels(3).float() / 255).last_hidden_state.double()
    assert hidden.shape == (3, 5, 16)
    expected = sum(hidden[:, token] for token in range(5)) / 5
    torch.testing.assert_close(embed(model, pixels(3), inputs, 3).double(), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_padding_is_no_part_of_a_texts_features() -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SMALL, vocab_size=11, pad_token_id=0)).eval()
    ids = torch.randint(1, 11, (4, 7), generator=torch.Generator().manual_seed(0))
    lengths = [7, 3, 1, 5]
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = 0
    features = embed(model, ids, inputs_of(model), 3)
    for row, length, found in zip(ids, lengths, features, strict=True):
        alone = model(input_ids=row[None, :length]).last_hidden_state[0].double().mean(0)
        torch.testing.assert_close(found.double(), alone, rtol=0, atol=1e-5)
