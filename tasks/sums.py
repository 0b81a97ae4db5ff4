"""Sums over micro-batches, kept as they come and added up in order.

So whoever computes the sum of a micro-batch, and however often that is interrupted, the mean has the same bits.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import torch

from lsp_core.durable import DamagedFileError, read_checked, write_durably
from tasks.caching import Work

SECONDS_BETWEEN_SAVES = 10.0
Sums = dict[int, tuple[float, int]]  # by the first example of a micro-batch: its values added up, and how many
log = logging.getLogger(__name__)


def keep_sums(
    work: Work,
    folder: str,
    share: range,
    compute: Callable[[list[range], Callable[[float, int], None]], None],
    progress: Callable[[int, int], None],
) -> Sums:
    """Returns the sums of the micro-batches of ``share``, which begins with one, in the order of the examples.

    ``compute(batches, take)`` calls ``take`` with each of those that are not kept yet in ``folder`` of the work, of
    micro-batches that are ranges of examples, in their order; they are kept there, in a file that no other writer has.
    Errors: whatever it raises.
    """
    size = work.runtime.micro_batch
    batches = [range(start, min(start + size, share.stop)) for start in range(share.start, share.stop, size)]
    sums = read_sums(work.scratch / folder, size)
    left = [batch for batch in batches if batch.start not in sums]
    file, own, saved = f"{folder}/{uuid4().hex}.safetensors", Sums(), time.monotonic()

    def take(value: float, number: int) -> None:
        nonlocal saved
        batch = left[len(own)]
        own[batch.start] = value, number
        progress(batch.stop - share.start, len(share))
        if len(own) == len(left) or time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
            _write(work, file, own)
            saved = time.monotonic()

    if left:
        compute(left, take)
        sums |= own
    return {batch.start: sums[batch.start] for batch in batches}


def read_sums(folder: Path, micro_batch: int) -> Sums:
    """Returns what is kept in ``folder`` of sums over so many examples each."""
    sums: Sums = {}
    for file in sorted(folder.glob("*.safetensors")):
        sums |= _read(file, micro_batch)
    return sums


def mean_of(sums: Sums) -> float:
    """Returns the mean over all examples, summed in float64 in the order of ``sums``."""
    total, count = 0.0, 0
    for value, number in sums.values():
        total += value
        count += number
    return total / count


def _write(work: Work, file: str, sums: Sums) -> None:
    values, counts = zip(*sums.values(), strict=True)
    tensors = {"first": torch.tensor(list(sums)), "sum": torch.tensor(values, dtype=torch.float64)}
    fields = {"micro_batch": work.runtime.micro_batch}
    write_durably(work.scratch / file, {**tensors, "count": torch.tensor(counts)}, fields)
    work.keep(file)


def _read(file: Path, micro_batch: int) -> Sums:
    try:
        saved = read_checked(file)
        if saved.fields != {"micro_batch": micro_batch}:
            raise DamagedFileError(f"{file} holds the sums of other micro-batches")
    except FileNotFoundError:
        return {}
    except DamagedFileError as error:
        log.warning("%s: these examples are run again", error)
        return {}
    first, total, count = (saved.tensors[name].tolist() for name in ("first", "sum", "count"))
    return dict(zip(first, zip(total, count, strict=True), strict=True))
