"""fisher: model, bases, allocation tokens -> a grid like the KL grid, of the diagonal Fisher's estimates."""

import shutil

import numpy as np

from lsp_core.fisher import Fisher
from storage.grid import KLGrid
from storage.manifest import ArtifactRef
from tasks.artifacts import read_bases
from tasks.caching import Work, stage
from tasks.examples import read_examples
from tasks.measure import measured_row, row_counts
from tasks.models import ModelSource, load_model


@stage()
def fisher(work: Work, *, model: ModelSource, bases: ArtifactRef, tokens: ArtifactRef, points: int) -> None:
    """Publishes the estimates of Delta_u(k), in nats per token, at k = i D / ``points``."""
    units, tensors = read_bases(work, bases)
    loaded = load_model(model, work.runtime.device)
    on_device = {name: q.to(work.runtime.device) for name, q in tensors.items()}
    with work.progress() as progress:
        examples = read_examples(work, tokens, loaded)
        estimates = Fisher(loaded, units, on_device, examples.values, inputs=examples.inputs, progress=progress)
    removed = np.stack([row_counts(unit, points) for unit in units])
    folder = work.scratch / "grid"
    shutil.rmtree(folder, ignore_errors=True)
    grid = KLGrid.create(str(folder), [unit.name for unit in units], removed, [i / points for i in range(1, points)])
    for row, unit in enumerate(units):
        grid.write_row(row, *measured_row(estimates.measure, unit, points))
    grid.compact(str(work.output))
