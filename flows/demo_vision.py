"""The vision demo: a small ViT compressed on its own task's images, without labels and with, and on a diverse pool.

The pools are of one size. Without labels training is validated by the KL, on as many images.
"""

from pathlib import Path
from typing import Any

from flows.compress import compress
from flows.config import (
    AllocationConfig,
    CalibrationConfig,
    CompressConfig,
    EvaluationConfig,
    ModelConfig,
    Objective,
    Target,
    TrainingConfig,
    ValidationConfig,
)
from flows.demo_digits import DigitsTraining, train_digits_model, write_images
from flows.sources import ImageSource, ImageTransfer
from tasks.report import table

RATIOS = (0.3, 0.5, 0.7)
POOLS = {  # images of each folder
    "single": {"train": 840},
    "diverse": {"train": 280, "strokes": 280, "photos": 280},
    "labelled": {"train": 840},
}
OBJECTIVES: dict[str, Objective] = {"single": "kl", "diverse": "kl", "labelled": "task"}
VALIDATION = {"kl": "validation-unlabelled", "task": "validation"}  # by the KL, which needs no labels, or the accuracy
TRANSFER = "digits 7 to 9"


def demo_vision(*, output: Path, store: str) -> dict[str, dict[str, Any]]:
    """Makes images and model, compresses it on each pool, prints the tables; returns the reports by pool.

    Images and model that are there already are taken as they are.
    """
    folders = write_images(output / "images")
    model = train_digits_model(folders, output / "model", DigitsTraining())
    contents = {}
    for pool in POOLS:
        contents[pool] = compress(vision_config(model, folders, pool, output=output / pool, store=store))
    for pool, content in contents.items():
        print(f"\n{pool} pool\n\n" + "\n".join(table(content)))
    print("\n" + "\n".join(gains(contents)))
    print(f"\nreports, plots and checkpoints: {output}")
    return contents


def vision_config(model: Path, folders: dict[str, Path], pool: str, *, output: Path, store: str) -> CompressConfig:
    """Returns the configuration for one of ``POOLS``, of the folders that ``write_images`` made."""
    images = tuple(ImageSource(path=folders[name], cap=count) for name, count in POOLS[pool].items())
    objective = OBJECTIVES[pool]
    transfer = {
        TRANSFER: ImageTransfer(
            train=ImageSource(path=folders["transfer-train"]), test=ImageSource(path=folders["transfer-test"])
        )
    }
    return CompressConfig(
        model=ModelConfig(name_or_path=str(model), dtype="float32"),
        targets=tuple(Target(ratio=ratio, objective=objective) for ratio in RATIOS),
        calibration=CalibrationConfig(images=images, sequences=sum(POOLS[pool].values())),
        allocation=AllocationConfig(sequences=128),
        validation=ValidationConfig(images=(ImageSource(path=folders[VALIDATION[objective]]),), sequences=120),
        training=TrainingConfig(
            epochs=15, batch_sequences=32, learning_rate=(2e-3, 7e-3), modulation_epochs=1, patience=5
        ),
        evaluation=EvaluationConfig(images=ImageSource(path=folders["test"]), transfer=transfer, tasks=()),
        store=store,
        output=output,
        device="cpu",
        micro_batch=128,
    )


def gains(contents: dict[str, dict[str, Any]]) -> list[str]:
    """Returns as Markdown lines what the diverse pool changes, by ratio, for the objective that needs no labels.

    *Source* is the accuracy on the model's own task, *transfer* that of a linear probe on classes that were never seen.
    Source: paper, table 'ViT-B/16 compressed on a single pool or a diverse pool'.
    """
    dense = contents["single"]["dense"]
    lines = [
        "| removed | source, single | diverse | transfer, single | diverse |  gain |",
        "|--------:|---------------:|--------:|-----------------:|--------:|------:|",
        f"|   dense | {dense['accuracy']:14.1%} |         | {_transfer(dense):16.1%} |         |       |",
    ]
    for ratio in RATIOS:
        single, diverse = (
            next(one for one in contents[pool]["results"] if one["ratio"] == ratio) for pool in ("single", "diverse")
        )
        before, after = _transfer(single), _transfer(diverse)
        lines.append(
            f"| {ratio:7.0%} | {single['accuracy']:14.1%} | {diverse['accuracy']:7.1%} | {before:16.1%} | "
            f"{after:7.1%} | {100 * (after - before):+5.1f} |"
        )
    return lines


def _transfer(evaluated: dict[str, Any]) -> float:
    accuracy: float = evaluated["transfer"][TRANSFER]["acc"]
    return accuracy
