"""Evaluation of models that give no text: accuracy, how near the features stay to the dense model's, and transfer."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.gram import NonFiniteError
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors, save_tensors
from tasks.caching import Work
from tasks.examples import Examples, read_examples
from tasks.images import UNLABELLED, read_classes
from tasks.probe import embed, linear_probe

EMBEDDINGS = "embeddings"
Transfer = tuple[str, ArtifactRef, ArtifactRef]  # a name, and the sets to fit and to test a probe on


def evaluate_features(
    work: Work,
    model: PreTrainedModel,
    test: ArtifactRef,
    *,
    dense: ArtifactRef | None,
    labelled: bool,
    transfer: Sequence[Transfer],
) -> dict[str, Any]:
    """Returns the figures of ``model`` on the test set, and of linear probes on its frozen features.

    ``similarity``: the mean cosine between its features of an example and those in ``dense``, the dense model's
    evaluation; without one the features are published and the figure is 1. ``accuracy``: of a classifier, on images
    that are ``labelled``. ``transfer``: by name, ``acc`` of the probe and whether its fit converged.
    Errors: ``NonFiniteError`` where the model is broken.
    """
    examples = read_examples(work, test, model, labels="needed" if labelled else "ignored")
    size = work.runtime.micro_batch
    features = embed(model, examples.values, examples.inputs, size)
    if not torch.isfinite(features).all():
        raise NonFiniteError(
            "the features of the test set hold a NaN or an infinity: the model is broken, or overflows"
        )
    result: dict[str, Any] = {"examples": len(examples.values), "similarity": 1.0}
    if dense is None:
        save_tensors(work.output / EMBEDDINGS, {"features": features})
    else:
        expected = load_tensors(work.folder(dense) / EMBEDDINGS)["features"]
        result["similarity"] = F.cosine_similarity(features.double(), expected.double(), dim=-1).mean().item()
    if examples.labels is not None:
        result["accuracy"] = accuracy(model, examples, size)
    if transfer:
        result["transfer"] = {name: _transfer(work, model, fit, held) for name, fit, held in transfer}
        result["transfer_mean"] = sum(one["acc"] for one in result["transfer"].values()) / len(transfer)
    return result


@torch.inference_mode()
def accuracy(model: PreTrainedModel, examples: Examples, micro_batch: int) -> float:
    """Returns the share of images whose likeliest class by the model's own head is the right one.

    Errors: ``NonFiniteError`` naming the first image whose logits are not finite.
    """
    assert examples.labels is not None
    right = 0
    for start in range(0, len(examples.values), micro_batch):
        logits: Tensor = model(**examples.inputs.arguments(examples.values[start : start + micro_batch], model)).logits
        finite = torch.isfinite(logits).all(1)
        if not finite.all():
            image = start + int((~finite).nonzero()[0])
            raise NonFiniteError(f"the logits of test image {image} hold a NaN or an infinity: the model is broken")
        right += int((logits.argmax(-1).cpu() == examples.labels[start : start + micro_batch]).sum())
    return right / len(examples.values)


def _transfer(work: Work, model: PreTrainedModel, fit: ArtifactRef, held: ArtifactRef) -> dict[str, Any]:
    features = []
    for ref in (fit, held):
        examples = read_examples(work, ref, model)
        features.append(embed(model, examples.values, examples.inputs, work.runtime.micro_batch))
    labels, held_labels = _labels(work, fit, held)
    found = linear_probe(features[0], labels, features[1], held_labels)
    return {"acc": found.accuracy, "converged": found.converged}


def _labels(work: Work, fit: ArtifactRef, held: ArtifactRef) -> tuple[Tensor, Tensor]:  # -> (N,), (M,)
    """Returns the labels of both sets by the ids of the first; a class that only the second has is another one."""
    folders = work.folder(fit), work.folder(held)
    labels, others = (load_tensors(folder, ["labels"])["labels"] for folder in folders)
    classes, names = (read_classes(folder) for folder in folders)
    if classes is None or names is None:
        return labels, others
    known = {name: number for number, name in enumerate(classes)}
    ids = torch.tensor([known.get(name, len(classes) + number) for number, name in enumerate(names)] + [UNLABELLED])
    return labels, ids[others]  # -1 is the last
