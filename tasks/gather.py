"""gather: model, token blocks -> units and their Gram matrices."""

from typing import Literal

import torch

from lsp_core.gram import gather_grams
from lsp_core.units import KVRouting, discover_units
from storage.manifest import ArtifactRef
from storage.tensors import save_tensors
from tasks.artifacts import read_tokens, write_units
from tasks.caching import Work, stage
from tasks.models import ModelSource, load_model


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
    checkpoint_sequences: int = 128,
) -> None:
    """Publishes the units and one Gram matrix (D, D) each.

    ``checkpoint_sequences``, a hint: sequences between two saves of the sums so far.
    """
    loaded = load_model(model, work.runtime.device)
    units = discover_units(loaded, kv_routing=kv_routing, tie=tie, exclude=exclude)
    with work.progress() as progress:
        grams = gather_grams(
            loaded,
            units,
            read_tokens(work, tokens),
            micro_batch=work.runtime.micro_batch,
            precision=getattr(torch, precision),
            progress=progress,
            work=work.scratch / "checkpoint",
            checkpoint_sequences=checkpoint_sequences,
            on_checkpoint=work.keep,
        )
    write_units(work.output, units)
    save_tensors(work.output, grams)
