"""Evaluation of models without text, against sums written out, and labels of two sets brought together by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification

from lsp_core.gram import NonFiniteError
from lsp_core.offload import offloaded
from storage.grid import save_tokens
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors, save_tensors
from tasks.artifacts import write_json
from tasks.caching import Work
from tasks.features import EMBEDDINGS, evaluate_features
from tasks.images import IMAGES
from tasks.probe import linear_probe

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WIDE = {"initializer_range": 0.3}
Publish = Callable[..., ArtifactRef]


def vit(seed: int) -> ViTForImageClassification:
    torch.manual_seed(seed)
    names = {0: "cat", 1: "dog", 2: "owl"}
    return ViTForImageClassification(ViTConfig(**SMALL, **WIDE, image_size=8, patch_size=4, id2label=names)).eval()


def bert(seed: int) -> BertModel:
    torch.manual_seed(seed)
    return BertModel(BertConfig(**SMALL, **WIDE, vocab_size=11, pad_token_id=0)).eval()


def pixels(count: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def images(published: Publish, key: str, values: Tensor, labels: list[int], classes: list[str]) -> ArtifactRef:
    mean, std = torch.full((3,), 0.5), torch.full((3,), 0.25)

    def fill(folder: Path) -> None:
        save_tensors(folder, {"pixels": values, "labels": torch.tensor(labels), "mean": mean, "std": std})
        write_json(folder / IMAGES, {"counts": [len(labels)], "classes": classes})

    return published("calibrate", fill, key)


def dense_evaluation(work: Work, published: Publish, model: Any, test: ArtifactRef, **options: Any) -> ArtifactRef:
    """Publishes what an evaluation of the dense model does."""
    evaluate_features(work, model, test, dense=None, transfer=[], **{"labelled": False, **options})
    features = load_tensors(work.output / EMBEDDINGS)
    return published("evaluate", lambda folder: save_tensors(folder / EMBEDDINGS, features))


def logits(model: ViTForImageClassification, values: Tensor) -> Tensor:
    return model.double()(pixel_values=(values.double() / 255 - 0.5) / 0.25).logits


def test_one_block_at_a_time_on_the_device_gives_the_same_bits(work: Work, published: Publish) -> None:
    test = images(published, "test", pixels(11), [0, 1, 2, 2, 1, 0, 2, 1, 0, 0, 1], ["owl", "dog", "cat"])
    fit = images(published, "fit", pixels(30, seed=1), [0, 1, 2] * 10, ["owl", "dog", "cat"])
    options: dict[str, Any] = {"dense": None, "labelled": True, "transfer": [("animals", fit, test)]}
    expected = evaluate_features(work, vit(0), test, **options)
    features = load_tensors(work.output / EMBEDDINGS)["features"].clone()
    model = vit(0)
    with offloaded(model, "cpu") as offload:
        assert evaluate_features(work, model, test, **options) == expected
    assert offload.moves > 0
    assert torch.equal(load_tensors(work.output / EMBEDDINGS)["features"], features)


@torch.no_grad()
def test_accuracy_is_the_share_of_largest_logits(work: Work, published: Publish) -> None:
    values, labels = pixels(11), [0, 1, 2, 2, 1, 0, 2, 1, 0, 0, 1]
    test = images(published, "test", values, labels, ["owl", "dog", "cat"])  # other ids than the model's
    found = evaluate_features(work, vit(0), test, dense=None, labelled=True, transfer=[])
    chosen = logits(vit(0), values).argmax(-1).tolist()
    right = [choice == {0: 2, 1: 1, 2: 0}[label] for choice, label in zip(chosen, labels, strict=True)]
    assert found == {"examples": 11, "similarity": 1.0, "accuracy": sum(right) / 11}
    assert 0 < sum(right) < 11
    unlabelled = evaluate_features(work, vit(0), test, dense=None, labelled=False, transfer=[])
    assert set(unlabelled) == {"examples", "similarity"}


@torch.no_grad()
def test_similarity_of_images_is_the_mean_cosine_to_the_dense_features(work: Work, published: Publish) -> None:
    values = pixels(7)
    test = images(published, "test", values, [0] * 7, ["cat"])
    dense = dense_evaluation(work, published, vit(0), test)
    found = evaluate_features(work, vit(1), test, dense=dense, labelled=False, transfer=[])
    scaled = (values.double() / 255 - 0.5) / 0.25
    features = [model.double().vit(pixel_values=scaled).last_hidden_state[:, 0].numpy() for model in (vit(0), vit(1))]
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(*features, strict=True)]
    # features of size 1 of 16 numbers, each with some tens of float32 roundings
    assert found["similarity"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert abs(found["similarity"]) < 0.9
    itself = evaluate_features(work, vit(0), test, dense=dense, labelled=False, transfer=[])
    assert itself["similarity"] == pytest.approx(1, abs=1e-6)


@torch.no_grad()
def test_similarity_of_texts_is_of_what_is_no_padding(work: Work, published: Publish) -> None:
    ids = np.array([[3, 4, 5, 6], [7, 0, 0, 0], [8, 9, 10, 0], [1, 2, 0, 0]])
    test = published("calibrate", lambda folder: save_tokens(folder, ids))
    dense = dense_evaluation(work, published, bert(0), test)
    found = evaluate_features(work, bert(1), test, dense=dense, labelled=False, transfer=[])
    cosines = []
    for row in ids:
        whole = torch.from_numpy(row[row > 0])[None]
        a, b = (model.double()(input_ids=whole).last_hidden_state[0].mean(0).numpy() for model in (bert(0), bert(1)))
        cosines.append(a @ b / np.sqrt((a @ a) * (b @ b)))
    assert found == {"examples": 4, "similarity": pytest.approx(np.mean(cosines), abs=1e-5)}


@torch.no_grad()
def test_classes_of_two_sets_are_brought_together_by_name(work: Work, published: Publish) -> None:
    torch.manual_seed(0)
    names = ["ash", "elm", "fir"]
    bright = {name: 80 * number for number, name in enumerate(names)} | {"yew": 40}

    def made(key: str, classes: list[str], each: int) -> tuple[ArtifactRef, list[str]]:
        labels = [number for number in range(len(classes)) for _ in range(each)]
        values = torch.stack([pixels(1, seed)[0] // 4 + bright[classes[label]] for seed, label in enumerate(labels)])
        return images(published, key, values, labels, classes), [classes[label] for label in labels]

    fit, told = made("fit", names, 8)
    held, expected = made("held", ["fir", "yew", "ash"], 4)  # another order, and a class that no one taught
    sets = [("trees", fit, held), ("again", fit, fit)]
    found = evaluate_features(work, vit(0), fit, dense=None, labelled=False, transfer=sets)
    features = {key: embedded(work, ref) for key, ref in (("fit", fit), ("held", held))}
    numbers = {name: number for number, name in enumerate([*names, "yew"])}
    labels = [torch.tensor([numbers[name] for name in of]) for of in (told, expected)]
    by_hand = linear_probe(features["fit"], labels[0], features["held"], labels[1])
    assert found["transfer"]["trees"] == {"acc": by_hand.accuracy, "converged": by_hand.converged}
    assert by_hand.accuracy == pytest.approx(2 / 3)  # both known classes, and nothing of the unknown one
    assert found["transfer"]["again"]["acc"] == 1.0
    assert found["transfer_mean"] == pytest.approx((1 + 2 / 3) / 2)


def embedded(work: Work, ref: ArtifactRef) -> Tensor:
    """Returns the features of the first token, as the classifier's head reads them."""
    values = load_tensors(work.folder(ref))["pixels"]
    hidden: Tensor = vit(0).vit(pixel_values=(values.float() / 255 - 0.5) / 0.25).last_hidden_state[:, 0]
    return hidden


def test_a_broken_model_is_told_by_its_features_or_its_logits(work: Work, published: Publish) -> None:
    test = images(published, "test", pixels(5), [0, 1, 2, 0, 1], ["cat", "dog", "owl"])
    broken = vit(0)
    with torch.no_grad():
        broken.classifier.bias[1] = torch.nan
    with pytest.raises(NonFiniteError, match="the logits of test image 0 hold a NaN or an infinity"):
        evaluate_features(work, broken, test, dense=None, labelled=True, transfer=[])
    with torch.no_grad():
        broken.vit.layernorm.weight[3] = torch.inf
    with pytest.raises(NonFiniteError, match="the features of the test set hold a NaN or an infinity"):
        evaluate_features(work, broken, test, dense=None, labelled=True, transfer=[])


def test_images_without_labels_where_they_are_needed(work: Work, published: Publish) -> None:
    test = images(published, "test", pixels(2), [0, -1], ["cat"])
    with pytest.raises(ValueError, match="have no labels: use class folders, or name a label_field"):
        evaluate_features(work, vit(0), test, dense=None, labelled=True, transfer=[])
