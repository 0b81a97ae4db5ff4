"""The dense model's output on the training set, computed once: D + 2 numbers a position.

It is kept in files of some examples each, cut between micro-batches: where the files end changes nothing.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.divergence import TeacherStatistic
from lsp_core.durable import DamagedFileError, digest_tensors, read_checked, write_durably
from lsp_core.gram import Progress, evaluating
from lsp_core.inputs import Inputs
from lsp_core.readout import Readout

FIELDS = ("m", "c", "entropy")
log = logging.getLogger(__name__)


def cache_teacher(
    model: PreTrainedModel,
    examples: Tensor,
    *,
    micro_batch: int,
    inputs: Inputs | None = None,
    progress: Progress | None = None,
    work: Path | None = None,
    checkpoint_sequences: int = 128,
    on_checkpoint: Callable[[], None] | None = None,
) -> TeacherStatistic:  # examples (B, ...) -> m (B, P, D), c (B, P), entropy (B, P)
    """Returns the dense model's statistic of every position of ``examples``, as training reads it, on the CPU.

    ``work``: a folder of this model alone, which keeps what is done every ``checkpoint_sequences`` examples; a second
    call continues from there. ``on_checkpoint`` is called after each of these.
    """
    readout = Readout(model, inputs, purpose="train")
    size = micro_batch if work is None else max(1, checkpoint_sequences // micro_batch) * micro_batch
    parts: list[dict[str, Tensor]] = []
    with torch.no_grad(), evaluating(model):
        for start in range(0, len(examples), size):
            rows = examples[start : start + size]
            file = None if work is None else work / f"teacher-{start:08d}.safetensors"
            part = None if file is None else _read(file, rows)
            if part is None:
                pieces = []
                for index, batch in enumerate(rows.split(micro_batch)):
                    pieces.append(_statistic(readout, batch.to(model.device)))
                    if progress is not None:
                        progress(start + min((index + 1) * micro_batch, len(rows)), len(examples))
                part = _joined(pieces)
                if file is not None:
                    write_durably(file, part, {"examples": digest_tensors({"examples": rows})})
                    if on_checkpoint is not None:
                        on_checkpoint()
            parts.append(part)
    return TeacherStatistic(**_joined(parts))


def _statistic(readout: Readout, batch: Tensor) -> dict[str, Tensor]:
    statistic = readout.statistic(readout.outputs(batch))
    return {name: getattr(statistic, name).cpu() for name in FIELDS}


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in FIELDS}


def _read(file: Path, rows: Tensor) -> dict[str, Tensor] | None:
    """Returns the statistic of ``rows`` if ``file`` holds it, whole."""
    try:
        saved = read_checked(file)
        if saved.fields != {"examples": digest_tensors({"examples": rows})} or set(saved.tensors) != set(FIELDS):
            raise DamagedFileError(f"{file} is the teacher of other examples")
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        log.warning("%s: these examples are computed again", error)
        return None
    return saved.tensors
