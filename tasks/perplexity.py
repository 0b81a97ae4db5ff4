"""Perplexity of a language model: its losses are summed by micro-batch, and the sums added up in order.

So whoever computes the sum of a micro-batch, the result has the same bits.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.durable import DamagedFileError, read_checked, write_durably
from lsp_core.gram import NonFiniteError
from lsp_core.inputs import inputs_of
from tasks.progress import Progress

SECONDS_BETWEEN_SAVES = 10.0
Sums = dict[int, tuple[float, int]]  # by the first window of a micro-batch: its losses in nats added up, and how many
log = logging.getLogger(__name__)


def measure_perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    micro_batch: int,
    progress: Progress,
    known: Mapping[int, tuple[float, int]] | None = None,
) -> float:  # (B, T)
    """Returns exp of the mean next-token loss over all windows, each predicted from its own beginning.

    Of an encoder-decoder, over the second half of each window, predicted from the first. ``known``: sums that need not
    be computed.

    Errors: ``NonFiniteError`` naming the first window whose logits are not finite.
    """
    total, count = 0.0, 0
    for start in range(0, len(windows), micro_batch):
        batch = windows[start : start + micro_batch]
        loss, tokens = (known or {}).get(start) or _sum_losses(model, batch, start)
        total += loss
        count += tokens
        progress(start + len(batch), len(windows))
    return math.exp(total / count)


def keep_sums(
    file: Path,
    model: PreTrainedModel,
    windows: Tensor,
    share: range,
    micro_batch: int,
    progress: Progress,
    on_save: Callable[[], None],
) -> None:
    """Computes the sums of the windows in ``share`` and keeps them in ``file``; ``read_sums`` reads a folder of such.

    ``share`` begins with a micro-batch. ``on_save`` is called after each save. Errors: as ``measure_perplexity``.
    """
    sums, saved = _read(file, micro_batch), time.monotonic()

    def save() -> None:
        starts, (losses, counts) = sorted(sums), zip(*(sums[start] for start in sorted(sums)), strict=True)
        tensors = {"first": torch.tensor(starts), "loss": torch.tensor(losses, dtype=torch.float64)}
        write_durably(file, {**tensors, "count": torch.tensor(counts)}, {"micro_batch": micro_batch})
        on_save()

    for start in range(share.start, share.stop, micro_batch):
        batch = windows[start : min(start + micro_batch, share.stop)]
        if start not in sums:
            sums[start] = _sum_losses(model, batch, start)
        progress(start - share.start + len(batch), len(share))
        if time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
            save()
            saved = time.monotonic()
    save()


def read_sums(folder: Path, micro_batch: int) -> Sums:
    """Returns what is kept in ``folder`` of sums over so many windows each."""
    sums: Sums = {}
    for file in sorted(folder.glob("*.safetensors")):
        sums |= _read(file, micro_batch)
    return sums


def _read(file: Path, micro_batch: int) -> Sums:
    try:
        saved = read_checked(file)
        if saved.fields != {"micro_batch": micro_batch}:
            raise DamagedFileError(f"{file} holds the sums of other micro-batches")
    except FileNotFoundError:
        return {}
    except DamagedFileError as error:
        log.warning("%s: these windows are run again", error)
        return {}
    first, loss, count = (saved.tensors[name].tolist() for name in ("first", "loss", "count"))
    return dict(zip(first, zip(loss, count, strict=True), strict=True))


@torch.inference_mode()
def _sum_losses(model: PreTrainedModel, windows: Tensor, first: int) -> tuple[float, int]:
    """Returns the sum of the losses of one micro-batch, added up in float64, and how many they are."""
    inputs = inputs_of(model)
    batch = windows.to(model.device)
    logits, targets = model(**inputs.arguments(batch, model)).logits, inputs.targets(batch)
    if inputs.decoder_start is None:
        logits, targets = logits[:, :-1], batch[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    finite = torch.isfinite(losses).all(1) & torch.isfinite(logits).flatten(1).all(1)
    if not finite.all():
        window = first + int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"the logits of test window {window} hold a NaN or an infinity: the model is broken, or overflows"
        )
    return losses.sum(dtype=torch.float64).item(), losses.numel()
