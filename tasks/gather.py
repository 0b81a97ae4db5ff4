"""gather: model, token blocks -> units and their Gram matrices."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.block_grams import gather_by_blocks
from lsp_core.discovery import Discovery, Group, KVRouting, discover
from lsp_core.durable import DamagedFileError, read_checked, write_durably
from lsp_core.gram import FILE, gather_grams, run_of
from lsp_core.units import Unit
from storage.digest import canonical_json, digest_bytes
from storage.manifest import ArtifactRef
from storage.tensors import save_tensors
from tasks.artifacts import unit_of, write_json, write_units
from tasks.caching import Parts, Share, Work, stage
from tasks.examples import Examples, read_examples
from tasks.models import ModelSource, load_model, load_skeleton, placed
from tasks.shares import contiguous

LEFT_ALONE = "left_alone.json"
PARTS = "parts"
Precision = Literal["float32", "float64"]
log = logging.getLogger(__name__)


def shared_units(
    work: Work,
    workers: int,
    *,
    model: ModelSource,
    tokens: ArtifactRef,
    kv_routing: KVRouting,
    tie: bool,
    exclude: list[str],
    precision: Precision,
    include: list[str] | None = None,
    groups: list[dict[str, Any]] | None = None,
    sequences: int | None = None,
    checkpoint_sequences: int = 128,
) -> list[Share]:
    """Returns the units in shares of neighbours, one a worker; a share sums over all examples, in the same order.

    Cost is counted in products a position: D^2 of every Gram matrix, times what an element of it is wider than one of
    the model's, and the parameters of all blocks, which every share runs.
    """
    skeleton = load_skeleton(model)
    units = _discover(skeleton, kv_routing=kv_routing, tie=tie, include=include, exclude=exclude, groups=groups).units
    width = getattr(torch, precision).itemsize / model.torch_dtype.itemsize
    summed = [width * unit.dimension**2 * (1 if unit.side == "input" else len(unit.members)) for unit in units]
    forward, sums = sum(unit.parameters for unit in units), [0.0, *accumulate(summed)]
    cut = contiguous(len(units), workers, lambda start, stop: forward + sums[stop] - sums[start])
    return [[asdict(units[index]) for index in share] for share in cut]


def gather_share(
    work: Work,
    share: Share,
    *,
    model: ModelSource,
    tokens: ArtifactRef,
    precision: Precision,
    sequences: int | None = None,
    checkpoint_sequences: int = 128,
    **_discovery: Any,
) -> None:
    """Sums the Gram matrices of the units in ``share`` and keeps them in a file of their own."""
    units = [unit_of(record) for record in share]
    loaded = load_model(model, work.runtime.device, offload=work.runtime.offload)
    examples = read_examples(work, tokens, loaded)
    examples = replace(examples, values=examples.values[:sequences])
    folder = Path(PARTS, digest_bytes(canonical_json(share).encode())[:16])
    grams = _sum(work, loaded, units, examples, precision, folder, checkpoint_sequences)
    write_durably(work.scratch / folder / FILE, grams, _whole(examples, precision))
    work.keep(str(folder))


@stage(parts=Parts(plan=shared_units, run=gather_share))
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
    loaded = load_model(model, work.runtime.device, offload=work.runtime.offload)
    found = _discover(loaded, kv_routing=kv_routing, tie=tie, include=include, exclude=exclude, groups=groups)
    for name, reason in found.left_alone.items():
        log.info("%s is left alone: %s", name, reason)
    examples = read_examples(work, tokens, loaded)
    examples = replace(examples, values=examples.values[:sequences])
    grams = _shared(work, examples, precision)
    rest = [unit for unit in found.units if unit.name not in grams]
    if rest:
        folder = Path("checkpoint")
        grams |= _sum(work, loaded, rest, examples, precision, folder, checkpoint_sequences)
    write_units(work.output, found.units)
    write_json(work.output / LEFT_ALONE, found.left_alone)
    save_tensors(work.output, {unit.name: grams[unit.name] for unit in found.units})


def _discover(
    model: PreTrainedModel,
    *,
    kv_routing: KVRouting,
    tie: bool,
    include: list[str] | None,
    exclude: list[str],
    groups: list[dict[str, Any]] | None,
) -> Discovery:
    explicit = [Group(members=tuple(group["members"]), side=group["side"]) for group in groups or ()]
    return discover(model, kv_routing=kv_routing, tie=tie, include=include or (), exclude=exclude, groups=explicit)


def _sum(
    work: Work,
    model: PreTrainedModel,
    units: Sequence[Unit],
    examples: Examples,
    precision: Precision,
    folder: Path,
    checkpoint_sequences: int,
) -> dict[str, Tensor]:
    """Returns the Gram matrices of ``units``; the sums so far are kept in the folder ``folder`` of the scratch."""
    with work.progress() as progress, placed(model, work.runtime) as home:
        gathering = gather_grams if home is None else partial(gather_by_blocks, home=home)
        return gathering(
            model,
            units,
            examples.values,
            inputs=examples.inputs,
            micro_batch=work.runtime.micro_batch,
            precision=getattr(torch, precision),
            progress=progress,
            work=work.scratch / folder,
            checkpoint_sequences=checkpoint_sequences,
            on_checkpoint=lambda: work.keep(str(folder)),
        )


def _shared(work: Work, examples: Examples, precision: Precision) -> dict[str, Tensor]:
    """Returns the Gram matrices of the shares that came to their end."""
    whole = _whole(examples, precision)
    found: dict[str, Tensor] = {}
    for file in sorted(work.scratch.glob(f"{PARTS}/*/{FILE}")):
        try:
            saved = read_checked(file)
        except (FileNotFoundError, DamagedFileError) as error:
            log.warning("%s: these units are summed again", error)
            continue
        if saved.fields == whole:
            found |= {name: gram for name, gram in saved.tensors.items() if name not in found}
    return found


def _whole(examples: Examples, precision: Precision) -> dict[str, Any]:
    """Returns the fields of sums over all of ``examples``."""
    run = run_of(examples.values, examples.inputs, getattr(torch, precision))
    return {"sequences": len(examples.values), "run": run}
