"""select: trainings that differ in the learning rate -> the one that validates best."""

import shutil
from typing import Any

from storage.manifest import ArtifactRef
from tasks.artifacts import read_json, write_json
from tasks.caching import Work, stage
from tasks.metrics import HIGHER_IS_BETTER
from tasks.train import HISTORY


@stage()
def select(work: Work, *, trainings: list[ArtifactRef]) -> None:
    """Publishes the best of ``trainings`` as ``train`` publishes it, and in its history what each rate validated at.

    The first of equals is kept.
    """
    records = [read_json(work.folder(training) / HISTORY) for training in trainings]
    best = best_training(records)
    for path in work.folder(trainings[best]).iterdir():
        if path.name != HISTORY:
            shutil.copyfile(path, work.output / path.name)
    sweep = [
        {
            "learning_rate": record["settings"]["learning_rate"],
            "best_epoch": record["best_epoch"],
            "validation": _best_validation(record),
        }
        for record in records
    ]
    write_json(work.output / HISTORY, {**records[best], "sweep": sweep})


def best_training(records: list[dict[str, Any]]) -> int:
    """Returns which of the histories, as ``train`` publishes them, has the best validation."""
    metrics = {record["metric"] for record in records}
    assert len(metrics) == 1, f"trainings that validate on {metrics} cannot be compared"
    values = [_best_validation(record) for record in records]
    return values.index(max(values) if metrics <= HIGHER_IS_BETTER else min(values))


def _best_validation(record: dict[str, Any]) -> float:
    validation: float = record["history"][record["best_epoch"]]["validation"]
    return validation
