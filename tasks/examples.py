"""Sets of examples as a model reads them: token blocks, or images with their labels."""

import logging
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.inputs import Inputs, inputs_of
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors
from tasks.artifacts import read_tokens
from tasks.caching import Work
from tasks.images import IMAGES, model_labels, read_classes

LabelUse = Literal["ignored", "where known", "needed"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """``values`` (N, ...), read by a model as ``inputs`` says; ``labels`` (N,) by its own class ids, or None."""

    values: Tensor
    inputs: Inputs
    labels: Tensor | None = None


def read_examples(work: Work, ref: ArtifactRef, model: PreTrainedModel, *, labels: LabelUse = "ignored") -> Examples:
    """Returns a set of examples for ``model``.

    ``labels``: where known, images of which one has no label that the model knows count as unlabelled.
    Errors: ``ValueError`` for labels that are needed and not there.
    """
    folder = work.folder(ref)
    if not (folder / IMAGES).exists():
        return Examples(values=read_tokens(work, ref), inputs=inputs_of(model))
    tensors = load_tensors(folder)
    if "tokens" in tensors:
        return Examples(values=tensors["tokens"], inputs=inputs_of(model))
    inputs = inputs_of(model, mean=tuple(tensors["mean"].tolist()), std=tuple(tensors["std"].tolist()))
    known: Tensor | None = None
    complete = bool((tensors["labels"] >= 0).all())
    if labels == "needed" and not complete:
        raise ValueError("the source's images have no labels: use class folders, or name a label_field")
    if labels != "ignored" and complete:
        try:
            known = model_labels(tensors["labels"], read_classes(folder), model.config.id2label)
        except ValueError as error:
            if labels == "needed":
                raise
            log.info("%s: they count as unlabelled", error)
    return Examples(values=tensors["pixels"], inputs=inputs, labels=known)
