"""bases: Gram matrices, weights -> one ordered orthonormal basis a unit."""

import logging

from lsp_core.basis import Init, ordered_basis
from lsp_core.units import weight_of
from storage.store import ArtifactRef
from storage.tensors import load_tensors, save_tensors
from tasks.artifacts import read_units, write_json, write_units
from tasks.caching import Work, stage
from tasks.models import ModelSource, load_model

log = logging.getLogger(__name__)


@stage()
def bases(work: Work, *, model: ModelSource, grams: ArtifactRef, init: Init) -> None:
    """Publishes the bases (D, D) and the ridge that each Gram matrix needed."""
    folder = work.folder(grams)
    units, loaded = read_units(folder), load_model(model, work.runtime.device)
    ridges: dict[str, float] = {}
    tensors = {}
    with work.progress() as progress:
        for done, unit in enumerate(units, 1):
            gram = load_tensors(folder, [unit.name])[unit.name].to(work.runtime.device)
            weights = [weight_of(loaded.get_submodule(member)).detach() for member in unit.members]
            basis = ordered_basis(unit, gram, weights, init=init)
            tensors[unit.name] = basis.q.cpu()
            ridges[unit.name] = basis.ridge
            if basis.ridge:
                log.warning("unit %s needed a ridge of %.3g", unit.name, basis.ridge)
            progress(done, len(units))
    write_units(work.output, units)
    write_json(work.output / "ridges.json", ridges)
    save_tensors(work.output, tensors)
