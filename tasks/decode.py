"""decode: a merged checkpoint -> tokens a second at a context, beside the dense model and untied factor pairs.

The shapes are the checkpoint's, the numbers random. The figures are the machine's: its name is part of the key.
"""

from lsp_core.decode_benchmark import decode as benchmark
from lsp_core.decode_settings import KINDS, TUNED, DecodeSettings
from storage.manifest import ArtifactRef
from tasks.artifacts import write_json
from tasks.caching import Work, stage

DECODE = "decode.json"
TUNED_ARMS = tuple(kind + TUNED for kind in KINDS)


@stage()
def decode(
    work: Work, *, checkpoint: ArtifactRef, contexts: list[int], batch: int, dtype: str, machine: str, tuned: bool
) -> None:
    """Publishes ``decode.json``: every arm at each of ``contexts``, in ``dtype``; ``tuned`` compiled as well.

    ``machine``: the name of the device that is measured.
    """
    settings = DecodeSettings(
        model=str(work.folder(checkpoint)),
        contexts=tuple(contexts),
        batches=(batch,),
        dtypes=(dtype,),
        arms=(*KINDS, *(TUNED_ARMS if tuned else ())),
        device=work.runtime.device,
    )
    write_json(work.output / DECODE, {**benchmark(settings), "model": "the checkpoint", "machine": machine})
