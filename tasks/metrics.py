"""The figures that models are compared by: which one an evaluation holds, and how people read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HIGHER_IS_BETTER = frozenset({"accuracy", "similarity"})  # of all others lower is


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a model's quality.

    ``name``: its key in ``evaluation.json``; ``title``: what it is called in a sentence; ``template``: how one value is
    printed; ``counted``: the key of what it was measured on, ``unit`` one of these; ``task``: what the task objective
    trains on, None where there is no task; ``explanation``: a sentence of the report.
    """

    name: str
    title: str
    template: str
    counted: str
    unit: str
    task: str | None
    explanation: str

    @property
    def higher_is_better(self) -> bool:
        return self.name in HIGHER_IS_BETTER


METRICS = (
    Metric(
        name="perplexity",
        title="perplexity",
        template="{:.2f}",
        counted="tokens",
        unit="token",
        task="the text itself",
        explanation="Perplexity is on the test text",
    ),
    Metric(
        name="accuracy",
        title="accuracy",
        template="{:.2%}",
        counted="examples",
        unit="image",
        task="the labels",
        explanation="Accuracy is on the test images",
    ),
    Metric(
        name="similarity",
        title="similarity",
        template="{:.4f}",
        counted="examples",
        unit="token",
        task=None,
        explanation="Similarity, the mean cosine to the dense model's features, is on the test set",
    ),
)


def metric_of(evaluation: Mapping[str, Any]) -> Metric:
    """Returns what ``evaluation``, as ``evaluate`` publishes it, measures a model's quality by.

    Errors: ``ValueError`` if it is none of ``METRICS``.
    """
    for metric in METRICS:
        if metric.name in evaluation:
            return metric
    names = ", ".join(metric.name for metric in METRICS)
    raise ValueError(f"an evaluation with {', '.join(evaluation)} has no metric: one of {names} is needed")
