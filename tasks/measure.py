"""measure: model, bases, allocation tokens -> the KL grid; a killed run continues at its first unmeasured row."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.sensitivity import Sensitivity, counts_to_measure, removal_counts
from lsp_core.units import Unit
from storage.grid import MEASURED, SKIPPED, KLGrid
from storage.manifest import ArtifactRef
from tasks.artifacts import read_bases
from tasks.caching import Work, stage
from tasks.examples import read_examples
from tasks.models import ModelSource, load_model

log = logging.getLogger(__name__)


@stage()
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
) -> None:
    pending = grid.pending()
    if not pending:
        return
    sensitivity = open_sensitivity(work, load_model(model, work.runtime.device), units, tensors, tokens)
    with work.progress() as progress:
        for done, row in enumerate(pending, len(units) - len(pending)):
            progress(done, len(units))
            grid.write_row(row, *measured_row(sensitivity.measure, units[row], points))
            work.keep()
        progress(len(units), len(units))


def open_sensitivity(
    work: Work, model: PreTrainedModel, units: Sequence[Unit], tensors: Mapping[str, Tensor], tokens: ArtifactRef
) -> Sensitivity:
    """Returns what measures truncations of ``model``, on the runtime's device, by the bases ``tensors``."""
    on_device = {name: q.to(work.runtime.device) for name, q in tensors.items()}
    examples = read_examples(work, tokens, model)
    return Sensitivity(
        model, units, on_device, examples.values, micro_batch=work.runtime.micro_batch, inputs=examples.inputs
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
