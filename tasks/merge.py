"""merge: trained projectors -> a checkpoint with plain factors, checked against the projected model."""

from dataclasses import asdict

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.inputs import probe
from lsp_core.merging import merge_model, outputs_of, projected_outputs, removed_directions
from lsp_core.modeling import save_compressed
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors
from tasks.allocate import read_removed
from tasks.artifacts import read_bases, read_units, write_json
from tasks.caching import Work, stage
from tasks.models import ModelSource, load_model, load_tokenizer
from tasks.processors import copy_processor

MERGE = "merge.json"
PROBE_TOKENS = 16
LOGIT_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 0.2,
    torch.float16: 0.05,
}  # of the largest logit


@stage()
def merge(work: Work, *, model: ModelSource, bases: ArtifactRef, projectors: ArtifactRef, tolerance: float) -> None:
    """Publishes a checkpoint folder that ``load_compressed`` reads, with the tokenizer and a report of the merge."""
    units = read_units(work.folder(bases))
    loaded = load_model(model)
    vectors = load_tensors(work.folder(projectors))
    examples = probe(loaded, length=PROBE_TOKENS)
    expected = projected_outputs(loaded, units, vectors, examples)
    report = merge_model(loaded, units, vectors, tolerance=tolerance)
    difference = relative_difference(loaded, examples, expected)
    if tolerance == 0 and difference > LOGIT_TOLERANCE[loaded.dtype]:
        raise ValueError(
            f"the merged model's outputs differ from the projected model's by {difference:.2g} of their size"
        )
    save_compressed(loaded, units, work.output, facts={"base_model_digest": model.digest})
    if model.processor is None:
        load_tokenizer(model.own_tokenizer).save_pretrained(work.output)
    else:
        copy_processor(model.processor, work.output)
    write_json(
        work.output / MERGE,
        {
            "logit_difference": difference,
            "largest_error": max((unit.error for unit in report.values()), default=0.0),
            "units": {name: asdict(unit) for name, unit in report.items()},
        },
    )


@torch.no_grad()
def relative_difference(model: PreTrainedModel, examples: Tensor, expected: Tensor) -> float:
    """Returns the largest difference of the outputs from ``expected``, relative to the largest of these."""
    return float((outputs_of(model, examples) - expected).abs().max() / expected.abs().max())


def merge_initial(work: Work, model: nn.Module, bases: ArtifactRef, allocation: ArtifactRef) -> None:
    """Merges the untrained projectors (NoLSP) into ``model``, in place."""
    units, tensors = read_bases(work, bases)
    removed = read_removed(work, allocation)
    merge_model(model, units, {name: removed_directions(tensors[name], count) for name, count in removed.items()})
