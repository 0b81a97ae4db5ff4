"""measure: model, bases, allocation tokens -> the KL grid; a killed run continues at its first unmeasured row."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.sensitivity import Sensitivity, counts_to_measure, removal_counts
from lsp_core.units import Unit
from storage.grid import MEASURED, SKIPPED, KLGrid
from storage.manifest import ArtifactRef
from tasks.artifacts import read_bases, read_units
from tasks.caching import Parts, Share, Work, stage
from tasks.examples import read_examples
from tasks.models import ModelSource, load_model, placed
from tasks.shares import contiguous

CHUNKS = 4  # shares a worker at most: a late or lost worker then holds up, or costs, less
FIXED = 0.1  # of all work, what loading the model and the teacher's pass may come to in more shares than workers
log = logging.getLogger(__name__)


def shared_rows(
    work: Work, workers: int, *, model: ModelSource, bases: ArtifactRef, tokens: ArtifactRef, points: int
) -> list[Share]:
    """Returns the rows still to be measured, in shares of about equal cost, and makes the grid that they are kept in.

    Cost is counted in blocks that are run: a candidate in block b runs b, what follows, and the head; a share loads the
    model, which counts as one pass, runs the teacher, and runs up to its first block.
    """
    units = read_units(work.folder(bases))
    rows = _open(work, units, points).pending()
    depth = 1 + max(unit.block for unit in units) + 1
    costs = [
        len(counts_to_measure(units[row], removal_counts(units[row], points))) * (depth - units[row].block)
        for row in rows
    ]
    sums = [0, *accumulate(costs)]
    fixed = [2 * depth + units[row].block for row in rows]
    shares = workers * min(CHUNKS, max(1, int(FIXED * sums[-1] / (workers * 2 * depth))))
    cut = contiguous(len(rows), shares, lambda start, stop: fixed[start] + sums[stop] - sums[start])
    return [[rows[index] for index in share] for share in cut]


def measure_share(
    work: Work, share: Share, *, model: ModelSource, bases: ArtifactRef, tokens: ArtifactRef, points: int
) -> None:
    """Measures the rows of ``share`` that are not measured yet."""
    units, tensors = read_bases(work, bases)
    grid = KLGrid.open(str(work.scratch / "grid"))
    _measure_rows(work, grid, model, units, tensors, tokens, points, share)


@stage(parts=Parts(plan=shared_rows, run=measure_share))
def measure(work: Work, *, model: ModelSource, bases: ArtifactRef, tokens: ArtifactRef, points: int) -> None:
    """Publishes the grid of Delta_u(k), in nats per token, at k = i D / ``points``."""
    units, tensors = read_bases(work, bases)
    grid = _open(work, units, points)
    _measure_rows(work, grid, model, units, tensors, tokens, points)
    try:
        grid.compact(str(work.output))
    except ValueError as error:
        log.warning("%s: what was measured earlier is damaged (%s): it starts again", work.label, error)
        shutil.rmtree(work.scratch / "grid")
        grid = _open(work, units, points)
        _measure_rows(work, grid, model, units, tensors, tokens, points)
        grid.compact(str(work.output))


def _measure_rows(
    work: Work,
    grid: KLGrid,
    model: ModelSource,
    units: Sequence[Unit],
    tensors: Mapping[str, Tensor],
    tokens: ArtifactRef,
    points: int,
    share: Share | None = None,
) -> None:
    """Measures the rows of the grid that are still to be measured, of ``share`` alone where it is given."""
    rows = range(len(units)) if share is None else share
    pending = [row for row in grid.pending() if row in rows]
    if not pending:
        return
    loaded = load_model(model, work.runtime.device, offload=work.runtime.offload)
    # of another part's row, status may be seen where kl was not yet
    own = [] if share is None else [f"grid/{folder}" for row in share for folder in KLGrid.folders_of(row)]
    with work.progress() as progress, placed(loaded, work.runtime) as home:
        sensitivity = open_sensitivity(work, loaded, units, tensors, tokens, home)
        for done, row in enumerate(pending, len(rows) - len(pending)):
            progress(done, len(rows))
            grid.write_row(row, *measured_row(sensitivity.measure, units[row], points))
            work.keep(*own)
        progress(len(rows), len(rows))


def open_sensitivity(
    work: Work,
    model: PreTrainedModel,
    units: Sequence[Unit],
    tensors: Mapping[str, Tensor],
    tokens: ArtifactRef,
    home: torch.device | None = None,
) -> Sensitivity:
    """Returns what measures truncations of ``model`` by the bases ``tensors``; ``home``: where its states wait."""
    examples = read_examples(work, tokens, model)
    return Sensitivity(
        model,
        units,
        tensors,
        examples.values,
        micro_batch=work.runtime.micro_batch,
        inputs=examples.inputs,
        home=home,
    )


def _open(work: Work, units: Sequence[Unit], points: int) -> KLGrid:
    """Returns the grid that an earlier attempt left, or an empty one where there is none or it does not open."""
    folder, names = work.scratch / "grid", [unit.name for unit in units]
    removed = np.stack([row_counts(unit, points) for unit in units])
    if folder.exists():
        try:
            grid = KLGrid.open(str(folder))
            if grid.describes(names, removed):
                return grid
            problem = "it is another one"
        except (ValueError, KeyError, OSError) as error:  # as zarr says it
            problem = str(error)
        log.warning("%s: the grid of an earlier attempt is damaged (%s): it starts again", work.label, problem)
        shutil.rmtree(folder)
    partial = work.scratch / "grid.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    KLGrid.create(str(partial), names, removed, [i / points for i in range(1, points)])
    partial.rename(folder)
    return KLGrid.open(str(folder))


def row_counts(unit: Unit, points: int) -> np.ndarray:  # -> (point,)
    """Returns the removed counts of one row of the grid, duplicates, 0 and D among them."""
    return np.array([round(i * unit.dimension / points) for i in range(1, points)])


def measured_row(
    measure: Callable[[str, int], float], unit: Unit, points: int
) -> tuple[np.ndarray, np.ndarray]:  # -> (point,), (point,)
    """Returns KL and status of one row, by ``measure(name, count)``; a count that occurs twice is measured once."""
    counts = row_counts(unit, points)
    wanted = set(counts_to_measure(unit, removal_counts(unit, points)))
    kl, status = np.full(len(counts), np.nan), np.full(len(counts), SKIPPED, dtype=np.uint8)
    for point, count in enumerate(counts.tolist()):
        if count in wanted:
            wanted.remove(count)
            kl[point], status[point] = measure(unit.name, count), MEASURED
    return kl, status
