"""decode: a merged checkpoint -> tokens a second at a context, beside the dense model and untied factor pairs.

The shapes are the checkpoint's, the numbers random. The figures are the machine's: its name is part of the key.
"""

import logging
from collections.abc import Sequence

from torch import get_num_threads

from lsp_core.decode_benchmark import decode as benchmark
from lsp_core.decode_settings import KINDS, TUNED, DecodeSettings
from storage.manifest import ArtifactRef
from tasks.artifacts import write_json
from tasks.caching import Work, stage

log = logging.getLogger(__name__)

DECODE = "decode.json"
TUNED_ARMS = tuple(kind + TUNED for kind in KINDS)


def settings_of(
    model: str, *, contexts: Sequence[int], batch: int, dtype: str, tuned: bool, device: str
) -> DecodeSettings:
    """Returns what is measured of ``model``. Errors: as ``DecodeSettings``."""
    return DecodeSettings(
        model=model,
        contexts=tuple(contexts),
        batches=(batch,),
        dtypes=(dtype,),
        arms=(*KINDS, *(TUNED_ARMS if tuned else ())),
        device=device,
    )


@stage()
def decode(
    work: Work,
    *,
    checkpoint: ArtifactRef,
    contexts: list[int],
    batch: int,
    dtype: str,
    machine: str,
    tuned: bool,
    torch_version: str,
) -> None:
    """Publishes ``decode.json``: every arm at each of ``contexts``, in ``dtype``; ``tuned`` compiled as well.

    ``machine``: the name of the device that is measured. A model that cannot be measured has no cells and a ``reason``:
    it is compressed all the same.
    """
    settings = settings_of(
        str(work.folder(checkpoint)),
        contexts=contexts,
        batch=batch,
        dtype=dtype,
        tuned=tuned,
        device=work.runtime.device,
    )
    try:
        found = benchmark(settings)
    except ValueError as error:
        log.warning("decoding is not measured: %s", error)
        found = {"cells": [], "reason": str(error), "threads": get_num_threads()}
    stated = {"model": "the checkpoint", "machine": machine, "dtype": dtype, "batch": batch, "torch": torch_version}
    write_json(work.output / DECODE, {**found, **stated})
