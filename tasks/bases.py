"""bases: Gram matrices, weights -> one ordered orthonormal basis a unit.

Each basis is a file of its own, written as soon as it is computed; a second run computes those that are not there.
"""

import logging
from pathlib import Path

from torch import Tensor, nn

from lsp_core.basis import Init, ordered_basis
from lsp_core.durable import DamagedFileError, name_again, read_checked, write_durably
from lsp_core.units import Unit, weight_of
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors, write_index
from tasks.artifacts import read_units, write_json, write_units
from tasks.caching import Work, stage
from tasks.models import ModelSource, load_model

log = logging.getLogger(__name__)


@stage()
def bases(work: Work, *, model: ModelSource, grams: ArtifactRef, init: Init, seed: int = 0) -> None:
    """Publishes the bases (D, D) and the ridge that each Gram matrix needed; ``seed`` is that of random ones."""
    folder = work.folder(grams)
    units = read_units(folder)
    loaded = load_model(model, work.runtime.device, offload=work.runtime.offload)
    files = {unit.name: work.scratch / "bases" / f"basis-{index:05d}.safetensors" for index, unit in enumerate(units)}
    ridges: dict[str, float] = {}
    with work.progress() as progress:
        for done, unit in enumerate(units, 1):
            file = files[unit.name]
            ridge = saved_ridge(file, unit)
            if ridge is None:
                gram = load_tensors(folder, [unit.name])[unit.name].to(work.runtime.device)
                ridge = write_basis(file, unit, gram, loaded, init, seed)
                work.keep()
            ridges[unit.name] = ridge
            if ridge:
                log.warning("unit %s needed a ridge of %.3g", unit.name, ridge)
            progress(done, len(units))
    write_units(work.output, units)
    write_json(work.output / "ridges.json", ridges)
    for file in files.values():
        name_again(file, work.output / file.name)
    write_index(work.output, {name: file.name for name, file in files.items()})


def write_basis(file: Path, unit: Unit, gram: Tensor, model: nn.Module, init: Init, seed: int) -> float:
    """Computes the basis of ``unit``, writes it to ``file`` and returns its ridge."""
    weights = [weight_of(model.get_submodule(member)).detach().to(gram.device) for member in unit.members]
    basis = ordered_basis(unit, gram, weights, init=init, seed=seed)
    write_durably(file, {unit.name: basis.q}, {"ridge": basis.ridge})
    return basis.ridge


def saved_ridge(file: Path, unit: Unit) -> float | None:
    """Returns the ridge in ``file``, or None where it does not hold the basis of ``unit``, whole."""
    try:
        saved = read_checked(file)
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.tensors.items()}
        if shapes != {unit.name: (unit.dimension, unit.dimension)}:
            raise DamagedFileError(f"{file} is the basis of another unit")
        ridge: float = saved.fields["ridge"]
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        log.warning("%s: the basis of unit %s is computed again", error, unit.name)
        return None
    return ridge
