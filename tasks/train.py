"""teacher and train: the dense model's outputs, computed once, and the projectors trained to match them."""

import logging
from typing import Any

import torch

from lsp_core.divergence import TeacherStatistic
from lsp_core.readout import Readout
from lsp_core.teacher import FIELDS, cache_teacher
from lsp_core.training import train_projectors
from lsp_core.training_settings import TrainingSettings, default_learning_rate
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors, save_tensors
from tasks.allocate import read_removed
from tasks.artifacts import read_bases, write_json
from tasks.caching import Work, stage
from tasks.examples import LabelUse, read_examples
from tasks.models import ModelSource, load_model

HISTORY = "training.json"
log = logging.getLogger(__name__)


@stage(name="train")
def teacher(work: Work, *, model: ModelSource, tokens: ArtifactRef, checkpoint_sequences: int = 128) -> None:
    """Publishes the dense model's statistic of the training set, D + 2 numbers a position; nothing for other heads.

    ``checkpoint_sequences``, a hint: sequences between two saves.
    """
    loaded = load_model(model, work.runtime.device)
    readout = Readout(loaded, purpose="train")
    if readout.kind == "lm" and readout.head is None:  # V numbers a token: recomputing costs less than keeping
        save_tensors(work.output, {})
        return
    with work.progress() as progress:
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
    units, tensors = read_bases(work, bases)
    loaded = load_model(model, work.runtime.device)
    rate = learning_rate or default_learning_rate(sum(p.numel() for p in loaded.parameters()))
    chosen = TrainingSettings(objective=objective, learning_rate=rate, micro_batch=work.runtime.micro_batch, **settings)
    kept = {} if dense_outputs is None else load_tensors(work.folder(dense_outputs))
    statistic = TeacherStatistic(**kept) if kept else None
    removed = read_removed(work, allocation)
    labels: LabelUse = "where known" if model.task == "image-classification" else "ignored"
    examples, held_out = (read_examples(work, ref, loaded, labels=labels) for ref in (tokens, validation))
    with work.progress() as progress:
        result = train_projectors(
            loaded,
            units,
            tensors,
            removed,
            examples.values,
            held_out.values,
            chosen,
            inputs=examples.inputs,
            labels=examples.labels,
            validation_labels=held_out.labels,
            teacher=statistic,
            work=work.scratch / "checkpoint",
            progress=progress,
            on_checkpoint=work.keep,
        )
    save_tensors(work.output, result.vectors)
    record = {"metric": result.metric, "best_epoch": result.best_epoch, "history": result.history}
    if result.diverged is not None:
        log.warning("%s: %s; its best epoch is kept", work.label, result.diverged)
        record["diverged"] = result.diverged
    write_json(work.output / HISTORY, record | {"settings": chosen.recorded()})


def teacher_bytes(model: ModelSource, sequences: int, length: int, hidden_size: int) -> int:
    """Returns how much the dense outputs of the training set take in the store."""
    number = max(4, torch.finfo(model.torch_dtype).bits // 8)
    return sequences * length * (hidden_size + 2) * number
