"""Gram matrices block by block: all micro-batches pass one block before any passes the next.

For models whose weights do not fit on the device together (``offload``): a block moves there once, and only its own
Grams are there with it. The sums add the same numbers in the same order as ``gather_grams``, so they are the same bits.
Of an encoder-decoder the whole encoder runs again before every block of the decoder.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.durable import write_durably
from lsp_core.gram import Progress, Sums, evaluating, gather_grams, load_sums, run_of
from lsp_core.inputs import Inputs, inputs_of
from lsp_core.streaming import Stream
from lsp_core.units import Unit


def gather_by_blocks(
    model: PreTrainedModel,
    units: Sequence[Unit],
    examples: Tensor,
    *,
    micro_batch: int,
    precision: torch.dtype = torch.float64,
    inputs: Inputs | None = None,
    home: torch.device | None = None,
    progress: Progress | None = None,
    work: Path | None = None,
    checkpoint_sequences: int = 128,
    on_checkpoint: Callable[[], None] | None = None,
) -> dict[str, Tensor]:  # examples (B, ...) -> {unit: (D, D)}
    """Returns what ``gather_grams`` returns, bit for bit, at ``home``, where hidden states wait too.

    None: on the model's device. ``work`` keeps the sums of every block that is through; a second call passes the blocks
    before it again, without summing. Where a block reads more of those before it than their hidden state, the rest is
    gathered as ``gather_grams`` does.
    Errors: as ``gather_grams``.
    """
    inputs = inputs or inputs_of(model)
    run = run_of(examples, inputs, precision)
    batches = list(examples.split(micro_batch))
    by_block = {block: [unit for unit in units if unit.block == block] for block in sorted({u.block for u in units})}
    grams: dict[str, Tensor] = {}

    def keep(found: dict[str, Tensor]) -> None:
        grams.update(found if home is None else {name: gram.to(home) for name, gram in found.items()})

    def file_of(block: int) -> Path | None:
        return None if work is None else work / f"grams-{block:04d}.safetensors"

    for block, chosen in by_block.items():
        file, sums = file_of(block), Sums(model, chosen, precision)
        if file is not None and load_sums(file, sums.grams, run):
            keep(sums.grams)
    pending = {block: chosen for block, chosen in by_block.items() if chosen[0].name not in grams}
    with torch.inference_mode(), evaluating(model):
        stream = Stream(model, batches, lambda batch: model.base_model(**inputs.arguments(batch, model))[0], home=home)
        for index in range(len(batches) if pending else 0):
            stream.begin(index, whole=index == 0)
        for block, chosen in pending.items():
            stream.advance_to(block)
            if not stream.possible:
                break
            sums = Sums(model, chosen, precision)

            def before(index: int, block: int = block, sums: Sums = sums) -> None:
                sums.leave_out_padding(inputs.kept(batches[index].to(model.device)))
                if progress is not None:
                    progress(block * len(examples) + index * micro_batch, len(stream.blocks) * len(examples))

            with sums.watching(chosen):
                stream.pass_on(before)
            keep(sums.grams)
            file = file_of(block)
            if file is not None:
                write_durably(file, sums.grams, {"sequences": len(examples), "run": run})
                if on_checkpoint is not None:
                    on_checkpoint()
    rest = [unit for unit in units if unit.name not in grams]
    if rest:
        keep(
            gather_grams(
                model,
                rest,
                examples,
                micro_batch=micro_batch,
                precision=precision,
                inputs=inputs,
                progress=progress,
                work=work,
                checkpoint_sequences=checkpoint_sequences,
                on_checkpoint=on_checkpoint,
            )
        )
    elif progress is not None:
        progress(len(examples), len(examples))
    return {unit.name: grams[unit.name] for unit in units}
