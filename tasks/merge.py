"""merge: trained projectors -> a checkpoint with plain factors, checked against the projected model."""

from dataclasses import asdict

from torch import nn

from lsp_core.merging import merge_model, removed_directions
from lsp_core.modeling import save_compressed
from storage.store import ArtifactRef
from storage.tensors import load_tensors
from tasks.allocate import read_removed
from tasks.artifacts import read_bases, write_json
from tasks.caching import Work, stage
from tasks.models import ModelSource, load_model, load_tokenizer

MERGE = "merge.json"


@stage(version=1)
def merge(work: Work, *, model: ModelSource, bases: ArtifactRef, projectors: ArtifactRef, tolerance: float) -> None:
    """Publishes a checkpoint folder that ``load_compressed`` reads, with the tokenizer and a report of the merge."""
    units, _ = read_bases(work, bases)
    loaded = load_model(model)
    report = merge_model(loaded, units, load_tensors(work.folder(projectors)), tolerance=tolerance)
    save_compressed(loaded, units, work.output, facts={"model": model.name, "revision": model.revision})
    load_tokenizer(model.tokenizer).save_pretrained(work.output)
    write_json(
        work.output / MERGE,
        {
            "largest_error": max((unit.error for unit in report.values()), default=0.0),
            "units": {name: asdict(unit) for name, unit in report.items()},
        },
    )


def merge_initial(work: Work, model: nn.Module, bases: ArtifactRef, allocation: ArtifactRef) -> None:
    """Merges the untrained projectors (NoLSP) into ``model``, in place."""
    units, tensors = read_bases(work, bases)
    removed = read_removed(work, allocation)
    merge_model(model, units, {name: removed_directions(tensors[name], count) for name, count in removed.items()})
