"""gather: model, token blocks -> units and their Gram matrices."""

import logging
from typing import Any, Literal

import torch

from lsp_core.discovery import Group, KVRouting, discover
from lsp_core.gram import gather_grams
from storage.manifest import ArtifactRef
from storage.tensors import save_tensors
from tasks.artifacts import write_json, write_units
from tasks.caching import Work, stage
from tasks.examples import read_examples
from tasks.models import ModelSource, load_model

LEFT_ALONE = "left_alone.json"
log = logging.getLogger(__name__)


@stage()
def gather(
    work: Work,
    *,
    model: ModelSource,
    tokens: ArtifactRef,
    kv_routing: KVRouting,
    tie: bool,
    exclude: list[str],
    precision: Literal["float32", "float64"],
    include: list[str] | None = None,
    groups: list[dict[str, Any]] | None = None,
    sequences: int | None = None,
    checkpoint_sequences: int = 128,
) -> None:
    """Publishes the units, one Gram matrix (D, D) each, and why each other matrix of a block is left alone.

    ``sequences``: of the first so many examples alone, none: of all. ``checkpoint_sequences``, a hint: examples between
    two saves of the sums so far.
    """
    loaded = load_model(model, work.runtime.device)
    found = discover(
        loaded,
        kv_routing=kv_routing,
        tie=tie,
        include=include or (),
        exclude=exclude,
        groups=[Group(members=tuple(group["members"]), side=group["side"]) for group in groups or ()],
    )
    for name, reason in found.left_alone.items():
        log.info("%s is left alone: %s", name, reason)
    examples = read_examples(work, tokens, loaded)
    with work.progress() as progress:
        grams = gather_grams(
            loaded,
            found.units,
            examples.values[:sequences],
            inputs=examples.inputs,
            micro_batch=work.runtime.micro_batch,
            precision=getattr(torch, precision),
            progress=progress,
            work=work.scratch / "checkpoint",
            checkpoint_sequences=checkpoint_sequences,
            on_checkpoint=work.keep,
        )
    write_units(work.output, found.units)
    write_json(work.output / LEFT_ALONE, found.left_alone)
    save_tensors(work.output, grams)
