"""The dense model's output on the training set, computed once: D + 2 numbers a token.

It is kept in files of some sequences each, cut between micro-batches: where the files end changes nothing.
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
from lsp_core.readout import Readout

FIELDS = ("m", "c", "entropy")
log = logging.getLogger(__name__)


def cache_teacher(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    micro_batch: int,
    progress: Progress | None = None,
    work: Path | None = None,
    checkpoint_sequences: int = 128,
    on_checkpoint: Callable[[], None] | None = None,
) -> TeacherStatistic:  # (B, T) -> m (B, T, D), c (B, T), entropy (B, T)
    """Returns the dense model's statistic of every position of ``tokens``, on the CPU.

    ``work``: a folder of this model alone, which keeps what is done every ``checkpoint_sequences`` sequences; a second
    call continues from there. ``on_checkpoint`` is called after each of these.
    """
    readout = Readout(model)
    size = micro_batch if work is None else max(1, checkpoint_sequences // micro_batch) * micro_batch
    parts: list[dict[str, Tensor]] = []
    with torch.no_grad(), evaluating(model):
        for start in range(0, len(tokens), size):
            rows = tokens[start : start + size]
            file = None if work is None else work / f"teacher-{start:08d}.safetensors"
            part = None if file is None else _read(file, rows)
            if part is None:
                pieces = []
                for index, batch in enumerate(rows.split(micro_batch)):
                    pieces.append(_statistic(readout, batch.to(model.device)))
                    if progress is not None:
                        progress(start + min((index + 1) * micro_batch, len(rows)), len(tokens))
                part = _joined(pieces)
                if file is not None:
                    write_durably(file, part, {"tokens": digest_tensors({"tokens": rows})})
                    if on_checkpoint is not None:
                        on_checkpoint()
            parts.append(part)
    return TeacherStatistic(**_joined(parts))


def _statistic(readout: Readout, batch: Tensor) -> dict[str, Tensor]:
    flat = readout.statistic(readout.features(batch).flatten(0, 1))
    return {name: getattr(flat, name).unflatten(0, batch.shape).cpu() for name in FIELDS}


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in FIELDS}


def _read(file: Path, rows: Tensor) -> dict[str, Tensor] | None:
    """Returns the statistic of ``rows`` if ``file`` holds it, whole."""
    try:
        saved = read_checked(file)
        if saved.fields != {"tokens": digest_tensors({"tokens": rows})} or set(saved.tensors) != set(FIELDS):
            raise DamagedFileError(f"{file} is the teacher of other sequences")
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        log.warning("%s: these sequences are computed again", error)
        return None
    return saved.tensors
