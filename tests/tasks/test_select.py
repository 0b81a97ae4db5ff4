"""Of several trainings the best is kept, as the metric reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.manifest import ArtifactRef
from storage.tensors import load_tensors, save_tensors
from tasks.artifacts import read_json, write_json
from tasks.caching import Work
from tasks.select import best_training, select
from tasks.train import HISTORY

Publish = Callable[..., ArtifactRef]


def record(metric: str, validations: list[float], rate: float = 1e-3) -> dict[str, Any]:
    """Returns a history whose best epoch is the best of ``validations``, which start at epoch 0."""
    best = max(validations) if metric == "accuracy" else min(validations)
    history = [{"epoch": epoch, "validation": value} for epoch, value in enumerate(validations)]
    if metric == "accuracy":
        history = [{**epoch, "validation_loss": 100 * rate} for epoch in history]
    settings = {"learning_rate": rate}
    return {"metric": metric, "best_epoch": validations.index(best), "history": history, "settings": settings}


@pytest.mark.parametrize(
    ("metric", "validations", "best"),
    [
        ("perplexity", [[30.0, 25.0], [30.0, 22.0, 24.0], [30.0, 31.0]], 1),
        ("kl", [[0.5, 0.4], [0.5, 0.45]], 0),
        ("accuracy", [[0.25, 0.5], [0.25, 0.75, 0.5]], 1),
        ("perplexity", [[30.0, 31.0], [30.0, 40.0]], 0),  # none is better than no training: the first
    ],
)
def test_the_best_validation_of_any_epoch_decides(metric: str, validations: list[list[float]], best: int) -> None:
    assert best_training([record(metric, values) for values in validations]) == best


def test_of_equal_accuracies_the_lower_loss_decides() -> None:
    records = [record("accuracy", [0.25, 0.75], rate) for rate in (1e-3, 1e-4, 1e-2)]
    assert best_training(records) == 1


def test_the_best_is_published_as_it_was_with_the_table_of_the_sweep(work: Work, published: Publish) -> None:
    rates, validations = (1e-3, 1e-2, 1e-4), ([9.0, 7.0], [9.0, 5.0, 6.0], [9.0, 8.0])

    def training(index: int) -> ArtifactRef:
        def fill(folder: Path) -> None:
            save_tensors(folder, {"unit": torch.full((3, 2), float(index), dtype=torch.float64)})
            write_json(folder / HISTORY, record("perplexity", validations[index], rates[index]))

        return published("train", fill, key=str(index))

    select.function(work, trainings=[training(index) for index in range(3)])
    assert torch.equal(load_tensors(work.output)["unit"], torch.ones(3, 2, dtype=torch.float64))
    history = read_json(work.output / HISTORY)
    assert history.pop("sweep") == [
        {"learning_rate": 1e-3, "best_epoch": 1, "validation": 7.0},
        {"learning_rate": 1e-2, "best_epoch": 1, "validation": 5.0},
        {"learning_rate": 1e-4, "best_epoch": 1, "validation": 8.0},
    ]
    assert history == record("perplexity", validations[1], rates[1])


def test_a_rate_that_diverges_may_be_the_best_until_then_and_all_may_not(work: Work, published: Publish) -> None:
    def training(key: str, validations: list[float]) -> ArtifactRef:
        def fill(folder: Path) -> None:
            save_tensors(folder, {"unit": torch.ones(3, 2)})
            write_json(folder / HISTORY, {**record("kl", validations, 0.1), "diverged": "the training loss is inf"})

        return published("train", fill, key=key)

    useless = [training("a", [0.5]), training("b", [0.5])]
    with pytest.raises(ValueError, match="every learning rate diverges: lower them"):
        select.function(work, trainings=useless)
    select.function(work, trainings=[useless[0], training("c", [0.5, 0.4])])
    sweep = read_json(work.output / HISTORY)["sweep"]
    assert [tried["validation"] for tried in sweep] == [0.5, 0.4]
    assert {tried["diverged"] for tried in sweep} == {"the training loss is inf"}
