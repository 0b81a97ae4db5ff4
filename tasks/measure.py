"""measure: model, bases, allocation tokens -> the KL grid; a killed run continues at its first unmeasured row."""

import shutil
from collections.abc import Sequence

import numpy as np

from lsp_core.sensitivity import Sensitivity, counts_to_measure, removal_counts
from lsp_core.units import Unit
from storage.grid import MEASURED, SKIPPED, KLGrid
from storage.store import ArtifactRef
from tasks.artifacts import read_bases, read_tokens
from tasks.caching import Work, stage
from tasks.models import ModelSource, load_model


@stage()
def measure(work: Work, *, model: ModelSource, bases: ArtifactRef, tokens: ArtifactRef, points: int) -> None:
    """Publishes the grid of Delta_u(k), in nats per token, at k = i D / ``points``."""
    units, tensors = read_bases(work, bases)
    grid = _open(work, units, points)
    pending = grid.pending()
    if pending:
        loaded = load_model(model, work.runtime.device)
        on_device = {name: q.to(work.runtime.device) for name, q in tensors.items()}
        sensitivity = Sensitivity(
            loaded, units, on_device, read_tokens(work, tokens), micro_batch=work.runtime.micro_batch
        )
        with work.progress() as progress:
            progress(len(units) - len(pending), len(units))
            for row in pending:
                grid.write_row(row, *_measure_row(sensitivity, units[row], points))
                progress(row + 1, len(units))
    grid.finish()
    shutil.copytree(work.scratch / "grid", work.output, dirs_exist_ok=True)


def _open(work: Work, units: Sequence[Unit], points: int) -> KLGrid:
    folder = work.scratch / "grid"
    if not folder.exists():
        partial = work.scratch / "grid.partial"
        shutil.rmtree(partial, ignore_errors=True)
        removed = np.stack([_row_counts(unit, points) for unit in units])
        KLGrid.create(str(partial), [unit.name for unit in units], removed, [i / points for i in range(1, points)])
        partial.rename(folder)
    return KLGrid.open(str(folder))


def _row_counts(unit: Unit, points: int) -> np.ndarray:  # -> (point,)
    return np.array([round(i * unit.dimension / points) for i in range(1, points)])


def _measure_row(sensitivity: Sensitivity, unit: Unit, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns KL and status of one row; a count that occurs twice in it is measured once."""
    counts = _row_counts(unit, points)
    wanted = set(counts_to_measure(unit, removal_counts(unit, points)))
    kl, status = np.full(len(counts), np.nan), np.full(len(counts), SKIPPED, dtype=np.uint8)
    for point, count in enumerate(counts.tolist()):
        if count in wanted:
            wanted.remove(count)
            kl[point], status[point] = sensitivity.measure(unit.name, count), MEASURED
    return kl, status
