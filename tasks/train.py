"""teacher and train: the dense model's outputs, computed once, and the projectors trained to match them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.distributed import Group
from lsp_core.divergence import TeacherStatistic
from lsp_core.readout import Readout
from lsp_core.teacher import FIELDS, cache_teacher
from lsp_core.training import Sharding, TrainingProgress, TrainingResult, train_projectors
from lsp_core.training_settings import TrainingSettings, default_learning_rate
from lsp_core.units import Unit
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors, save_tensors
from tasks.allocate import read_removed
from tasks.artifacts import read_bases, write_json
from tasks.caching import Work, stage
from tasks.examples import Examples, LabelUse, read_examples
from tasks.launch import in_processes_of_their_own, launch_training
from tasks.models import ModelSource, load_model, placed

HISTORY = "training.json"
CHECKPOINT = "checkpoint"
log = logging.getLogger(__name__)


@stage(name="train")
def teacher(work: Work, *, model: ModelSource, tokens: ArtifactRef, checkpoint_sequences: int = 128) -> None:
    """Publishes the dense model's statistic of the training set, D + 2 numbers a position; nothing for other heads.

    ``checkpoint_sequences``, a hint: sequences between two saves.
    """
    loaded = load_model(model, work.runtime.device, offload=work.runtime.offload)
    with placed(loaded, work.runtime), work.progress() as progress:
        readout = Readout(loaded, purpose="train")
        if readout.kind == "lm" and readout.head is None:  # V numbers a token: recomputing costs less than keeping
            save_tensors(work.output, {})
            return
        examples = read_examples(work, tokens, loaded)
        statistic = cache_teacher(
            loaded,
            examples.values,
            inputs=examples.inputs,
            micro_batch=work.runtime.micro_batch,
            progress=progress,
            work=work.scratch / "teacher",
            checkpoint_sequences=checkpoint_sequences,
            on_checkpoint=work.keep,
        )
    save_tensors(work.output, {name: getattr(statistic, name) for name in FIELDS})


@stage()
def train(
    work: Work,
    *,
    model: ModelSource,
    bases: ArtifactRef,
    allocation: ArtifactRef,
    tokens: ArtifactRef,
    validation: ArtifactRef,
    objective: str,
    learning_rate: float | None,
    dense_outputs: ArtifactRef | None = None,
    **settings: Any,
) -> None:
    """Publishes the best epoch's V (D, K) of every unit, and the history.

    ``learning_rate``: none is the default for the model's size. ``dense_outputs``, a hint: as ``teacher`` publishes
    them; without them they are recomputed for each micro-batch.
    """
    inputs = {"bases": bases, "allocation": allocation, "tokens": tokens, "validation": validation}
    if dense_outputs is not None:
        inputs["dense_outputs"] = dense_outputs
    settings |= {"objective": objective, "learning_rate": learning_rate}
    if in_processes_of_their_own(work.runtime.launch):
        launch_training(work, model, inputs, settings)
        return
    training = load_training(work, work.runtime.device, model, inputs, settings)
    with work.progress() as progress:
        result = training.run(work.scratch, progress, work.keep)
    training.write(work.output, work.label, result)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training needs, in memory."""

    model: PreTrainedModel
    units: list[Unit]
    bases: Mapping[str, Tensor]
    removed: dict[str, int]
    examples: Examples
    validation: Examples
    teacher: TeacherStatistic | None
    settings: TrainingSettings

    def run(
        self,
        scratch: Path,
        progress: TrainingProgress | None,
        on_checkpoint: Callable[[], None] | None,
        group: Group | None = None,
        sharding: Sharding = "replicated",
    ) -> TrainingResult:
        """Trains, from the last checkpoint in ``scratch`` if there is one, alone or as one process of a ``group``."""
        return train_projectors(
            self.model,
            self.units,
            self.bases,
            self.removed,
            self.examples.values,
            self.validation.values,
            self.settings,
            inputs=self.examples.inputs,
            labels=self.examples.labels,
            validation_labels=self.validation.labels,
            teacher=self.teacher,
            work=scratch / CHECKPOINT,
            progress=progress,
            on_checkpoint=on_checkpoint,
            group=group,
            sharding=sharding,
        )

    def write(self, output: Path, label: str, result: TrainingResult) -> None:
        """Writes what the stage publishes."""
        save_tensors(output, result.vectors)
        record = {"metric": result.metric, "best_epoch": result.best_epoch, "history": result.history}
        if result.best_epoch == 0 and result.diverged is None:
            log.warning(
                "%s: no epoch is better than the start, which is kept: lower the learning rate, or train on more "
                "sequences",
                label,
            )
        if result.diverged is not None:
            log.warning("%s: %s; its best epoch is kept", label, result.diverged)
            record["diverged"] = result.diverged
        write_json(output / HISTORY, record | {"settings": self.settings.recorded()})


def load_training(
    work: Work, device: str, model: ModelSource, inputs: Mapping[str, ArtifactRef], settings: Mapping[str, Any]
) -> Training:
    """Returns what the stage's ``inputs`` and ``settings`` name, with the model on ``device``.

    Errors: ``ValueError``, ``OSError`` where it cannot be read.
    """
    units, tensors = read_bases(work, inputs["bases"])
    loaded = load_model(model, device)
    rate = settings["learning_rate"] or default_learning_rate(sum(p.numel() for p in loaded.parameters()))
    chosen = TrainingSettings(**{**settings, "learning_rate": rate}, micro_batch=work.runtime.micro_batch)
    kept = load_tensors(work.folder(inputs["dense_outputs"])) if "dense_outputs" in inputs else {}
    labels: LabelUse = "where known" if model.task == "image-classification" else "ignored"
    return Training(
        model=loaded,
        units=units,
        bases=tensors,
        removed=read_removed(work, inputs["allocation"]),
        examples=read_examples(work, inputs["tokens"], loaded, labels=labels),
        validation=read_examples(work, inputs["validation"], loaded, labels=labels),
        teacher=TeacherStatistic(**kept) if kept else None,
        settings=chosen,
    )


def teacher_bytes(model: ModelSource, sequences: int, length: int, hidden_size: int) -> int:
    """Returns how much the dense outputs of the training set take in the store."""
    number = max(4, torch.finfo(model.torch_dtype).bits // 8)
    return sequences * length * (hidden_size + 2) * number
