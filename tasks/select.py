"""select: trainings that differ in the learning rate -> the one that validates best."""

import shutil
from typing import Any

from lsp_core.training import is_better
from storage.manifest import ArtifactRef
from tasks.artifacts import read_json, write_json
from tasks.caching import Work, stage
from tasks.train import HISTORY


@stage()
def select(work: Work, *, trainings: list[ArtifactRef]) -> None:
    """Publishes the best of ``trainings`` as ``train`` publishes it, and in its history what each rate validated at.

    The first of equals is kept. Errors: ``ValueError`` if every one diverged before its first epoch's end.
    """
    records = [read_json(work.folder(training) / HISTORY) for training in trainings]
    if all("diverged" in record and record["best_epoch"] == 0 for record in records):
        raise ValueError(f"every learning rate diverges: lower them ({records[0]['diverged']})")
    best = best_training(records)
    for path in work.folder(trainings[best]).iterdir():
        if path.name != HISTORY:
            shutil.copyfile(path, work.output / path.name)
    sweep = [
        {
            "learning_rate": record["settings"]["learning_rate"],
            "best_epoch": record["best_epoch"],
            "validation": _best_epoch(record)["validation"],
            **({"diverged": record["diverged"]} if "diverged" in record else {}),
        }
        for record in records
    ]
    write_json(work.output / HISTORY, {**records[best], "sweep": sweep})


def best_training(records: list[dict[str, Any]]) -> int:
    """Returns which of the histories, as ``train`` publishes them, has the best epoch, by the rule that chose it."""
    metrics = {record["metric"] for record in records}
    assert len(metrics) == 1, f"trainings that validate on {metrics} cannot be compared"
    metric, epochs = metrics.pop(), [_best_epoch(record) for record in records]
    best = 0
    for index, epoch in enumerate(epochs):
        if is_better(epoch, epochs[best], metric):
            best = index
    return best


def _best_epoch(record: dict[str, Any]) -> dict[str, float]:
    epoch: dict[str, float] = record["history"][record["best_epoch"]]
    return epoch
