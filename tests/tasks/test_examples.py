"""Sets of examples as models read them: both kinds of artifacts, and which labels a model knows."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from storage.grid import save_tokens
from storage.manifest import ArtifactRef
from storage.tensors import save_tensors
from tasks.artifacts import write_json
from tasks.caching import Work
from tasks.examples import LabelUse, read_examples
from tasks.images import IMAGES

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
Publish = Callable[..., ArtifactRef]


@pytest.fixture(scope="module")
def classifier() -> ViTForImageClassification:
    names = {0: "cat", 1: "dog", 2: "owl"}
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4, id2label=names)).eval()


def images(published: Publish, labels: Sequence[int], classes: list[str] | None) -> ArtifactRef:
    pixels = torch.arange(len(labels) * 192).remainder(256).to(torch.uint8).view(-1, 3, 8, 8)
    tensors = {"pixels": pixels, "labels": torch.tensor(labels), "mean": torch.tensor(MEAN), "std": torch.tensor(STD)}

    def fill(folder: Path) -> None:
        save_tensors(folder, tensors)
        write_json(folder / IMAGES, {"counts": [len(labels)], "classes": classes})

    return published("calibrate", fill)


def test_token_blocks_of_a_language_model_and_of_an_encoder(work: Work, published: Publish) -> None:
    ids = np.array([[5, 6, 0], [7, 0, 0]])
    ref = published("calibrate", lambda folder: save_tokens(folder, ids))
    lm = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=11, pad_token_id=0))
    encoder = BertModel(BertConfig(**SMALL, vocab_size=11, pad_token_id=0))
    for model, mask in ((lm, None), (encoder, [[1, 1, 0], [1, 0, 0]])):
        found = read_examples(work, ref, model)
        assert found.values.tolist() == ids.tolist()
        assert found.labels is None
        kept = found.inputs.kept(found.values)
        assert kept is mask is None or kept.long().tolist() == mask


def test_labelled_texts_are_tokens(work: Work, published: Publish) -> None:
    tensors = {"tokens": torch.tensor([[5, 6], [7, 0]]), "labels": torch.tensor([1, 0])}

    def fill(folder: Path) -> None:
        save_tensors(folder, tensors)
        write_json(folder / IMAGES, {"counts": [2], "classes": ["a", "b"]})

    found = read_examples(work, published("calibrate", fill), BertModel(BertConfig(**SMALL, vocab_size=11)))
    assert torch.equal(found.values, tensors["tokens"])
    assert found.labels is None  # the encoder has no classes of its own


def test_pixels_are_normalized_as_their_set_says(
    work: Work, published: Publish, classifier: ViTForImageClassification
) -> None:
    found = read_examples(work, images(published, [0, 1], None), classifier)
    read = found.inputs.arguments(found.values, classifier)["pixel_values"]
    for channel in range(3):
        expected = (found.values[:, channel].double() / 255 - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(read[:, channel].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "classes", "known"),
    [
        ([0, 1, 0], ["owl", "cat"], [2, 0, 2]),  # by name, whatever the order of the folders
        ([2, 0, 1], None, [2, 0, 1]),  # by number
        ([0, 1, 0], ["ash", "elm"], None),  # other classes
        ([0, -1, 1], ["cat", "dog"], None),  # some without
        ([3, 0, 1], None, None),  # no such number
    ],
)
def test_labels_are_the_models_own_or_none(
    work: Work,
    published: Publish,
    classifier: ViTForImageClassification,
    caplog: pytest.LogCaptureFixture,
    labels: list[int],
    classes: list[str] | None,
    known: list[int] | None,
) -> None:
    ref = images(published, labels, classes)

    def read(use: LabelUse) -> Tensor | None:
        return read_examples(work, ref, classifier, labels=use).labels

    with caplog.at_level(logging.INFO):
        assert read("ignored") is None
    assert not caplog.records
    found = read("where known")
    assert (None if found is None else found.tolist()) == known
    if known is None:
        with pytest.raises(ValueError, match=r"have no labels: use class folders|are not among the 3 that the model"):
            read("needed")
    else:
        needed = read("needed")
        assert needed is not None
        assert needed.tolist() == known
