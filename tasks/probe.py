"""Linear probes: how much of a labelled set the frozen features of a model tell apart.

Source: paper, section 'Vision Transformers', and its appendix on transfer.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.gram import NonFiniteError
from lsp_core.inputs import PIXELS, Inputs

ITERATIONS = 1000


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """``accuracy``: share of the test examples told right; ``converged``: whether the fit came to its end."""

    accuracy: float
    converged: bool


def linear_probe(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor
) -> LinearProbe:  # (N, D), (N,), (M, D), (M,)
    """Returns how well multinomial logistic regression on standardized training features tells the test set's classes.

    With the penalty |W|^2 / 2 beside the summed cross-entropy. A class that only the test set has counts as told wrong.
    Errors: ``ValueError`` for examples without a label or fewer than two classes; ``NonFiniteError`` for features that
    are not finite.
    """
    for name, features, labels in (
        ("training", train_features, train_labels),
        ("test", test_features, test_labels),
    ):
        if not torch.isfinite(features).all():
            raise NonFiniteError(f"the features of the {name} set hold a NaN or an infinity: the model is broken")
        if (labels < 0).any():
            raise ValueError(f"the {name} set of a linear probe has images without a label: use class folders")
    if len(train_labels.unique()) < 2:
        raise ValueError("the training set of a linear probe has one class alone: it needs two or more")
    scaler = StandardScaler().fit(_array(train_features))
    classifier = LogisticRegression(C=1.0, max_iter=ITERATIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        classifier.fit(scaler.transform(_array(train_features)), train_labels.numpy())
    for warning in caught:
        if not issubclass(warning.category, ConvergenceWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    told = classifier.predict(scaler.transform(_array(test_features)))
    return LinearProbe(
        accuracy=float(np.mean(told == test_labels.numpy())),
        converged=not any(issubclass(warning.category, ConvergenceWarning) for warning in caught),
    )


@torch.inference_mode()
def embed(
    model: PreTrainedModel, examples: Tensor, inputs: Inputs, micro_batch: int
) -> Tensor:  # (N, ...) -> (N, D) float32, on the CPU
    """Returns the features of each example: what a classifier's head reads, else the mean over unpadded tokens."""
    return torch.cat([_features(model, batch, inputs).float().cpu() for batch in examples.split(micro_batch)])


def class_head(model: PreTrainedModel) -> nn.Linear | None:
    """Returns the first linear layer right in ``model`` that gives its classes, None for one without a head."""
    for module in model.children():
        if isinstance(module, nn.Linear) and module.out_features == model.config.num_labels:
            return module
    return None


def _features(model: PreTrainedModel, batch: Tensor, inputs: Inputs) -> Tensor:  # -> (B, D)
    head = class_head(model) if inputs.name == PIXELS else None
    read: list[Tensor] = []
    handle = None if head is None else head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    try:
        outputs = model(**inputs.arguments(batch, model))
    finally:
        if handle is not None:
            handle.remove()
    if read:
        return read[0] if read[0].dim() == 2 else read[0].flatten(1, -2).mean(1)
    hidden: Tensor = outputs.last_hidden_state  # (B, T, D)
    kept = inputs.kept(batch) if inputs.name != PIXELS else None
    if kept is None:
        return hidden.mean(1)
    weights = kept.to(hidden.device, hidden.dtype)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def _array(features: Tensor) -> np.ndarray:
    return features.double().numpy()
