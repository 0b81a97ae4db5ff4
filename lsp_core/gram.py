"""Gram matrices of the projected activations, the only statistic of the calibration data that the bases need.

Input-side unit: sum of x xT over tokens. Output-side unit: sum of y yT over tokens and members, y the bias-free output
(for a down projection that is D_out^2 numbers instead of D_ff^2).

There is one running sum. It is saved between micro-batches, so that what continues from it adds the same numbers in the
same order as what was never interrupted.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.durable import DamagedFileError, digest_tensors, read_checked, write_durably
from lsp_core.inputs import Inputs, inputs_of
from lsp_core.units import Unit, bias_of

FILE = "grams.safetensors"
Progress = Callable[[int, int], None]
log = logging.getLogger(__name__)


class NonFiniteError(ValueError):
    """A NaN or an infinity where a finite number is required; the message names the place."""


def gather_grams(
    model: PreTrainedModel,
    units: Sequence[Unit],
    examples: Tensor,
    *,
    micro_batch: int,
    precision: torch.dtype = torch.float64,
    inputs: Inputs | None = None,
    progress: Progress | None = None,
    work: Path | None = None,
    checkpoint_sequences: int = 128,
    on_checkpoint: Callable[[], None] | None = None,
) -> dict[str, Tensor]:  # examples (B, ...) -> {unit: (D, D)}
    """Returns the unnormalized Gram matrix of every unit, in ``precision``, summed over all positions but the padding.

    ``inputs``: how the model reads ``examples``, none: as ``inputs_of`` says. ``work``: a folder of this model alone,
    which keeps the sums every ``checkpoint_sequences`` examples; a second call continues from there. ``on_checkpoint``
    is called after each of these.
    Errors: ``NonFiniteError`` naming the layer whose activation is not finite.
    Source: paper, Algorithm 1 'Gather'.
    """
    device = model.device
    inputs = inputs or inputs_of(model)
    grams = {u.name: torch.zeros(u.dimension, u.dimension, dtype=precision, device=device) for u in units}
    layers = dict(model.named_modules())
    kept: list[Tensor | None] = [None]

    def accumulate(name: str, gram: Tensor, activation: Tensor) -> None:
        rows = activation.detach().reshape(-1, activation.shape[-1])
        if kept[0] is not None:
            if len(rows) != len(kept[0]):
                raise ValueError(
                    f"layer {name} reads {len(rows)} positions of {len(kept[0])} tokens, so padding cannot be left "
                    "out: exclude it by discovery.exclude"
                )
            rows = rows[kept[0]]
        rows = rows.to(precision)
        gram.addmm_(rows.T, rows)
        if not torch.isfinite(gram.diagonal()).all():
            raise NonFiniteError(f"layer {name} produces a NaN or an infinity: check the model's weights and dtype")

    def watch(unit: Unit) -> Iterator[torch.utils.hooks.RemovableHandle]:
        gram = grams[unit.name]
        if unit.side == "input":  # one Gram serves the group, its members read the same tensor
            name = unit.members[0]
            yield layers[name].register_forward_pre_hook(lambda _, args: accumulate(name, gram, args[0]))
            return
        for name in unit.members:

            def hook(module: nn.Module, _: object, output: Tensor, name: str = name) -> None:
                bias = bias_of(module)
                accumulate(name, gram, output if bias is None else output - bias)

            yield layers[name].register_forward_hook(hook)

    with torch.inference_mode(), ExitStack() as stack, evaluating(model):
        for unit in units:
            for handle in watch(unit):
                stack.callback(handle.remove)
        file = None if work is None else work / FILE
        run = {"precision": str(precision), "inputs": repr(inputs), "examples": digest_tensors({"examples": examples})}
        done = saved = 0 if file is None else _load_sums(file, grams, run)
        for batch in examples[done:].split(micro_batch):
            batch = batch.to(device)
            mask = inputs.kept(batch)
            kept[0] = None if mask is None else mask.reshape(-1)
            model.base_model(**inputs.arguments(batch, model))
            done += len(batch)
            if progress is not None:
                progress(done, len(examples))
            if file is not None and done - saved >= checkpoint_sequences and done < len(examples):
                write_durably(file, grams, {"sequences": done, "run": run})
                saved = done
                if on_checkpoint is not None:
                    on_checkpoint()
    return grams


def _load_sums(file: Path, grams: Mapping[str, Tensor], run: Mapping[str, Any]) -> int:
    """Fills ``grams`` from ``file`` and returns the number of sequences in them; 0 where it is not there or no use."""
    try:
        saved = read_checked(file)
        shapes = {name: tensor.shape for name, tensor in saved.tensors.items()}
        if saved.fields.get("run") != run or shapes != {name: gram.shape for name, gram in grams.items()}:
            raise DamagedFileError(f"{file} holds the sums of other units, tokens or another precision")
    except FileNotFoundError:
        return 0
    except DamagedFileError as error:
        log.warning("%s: the Gram matrices are summed from zero", error)
        return 0
    for name, gram in grams.items():
        gram.copy_(saved.tensors[name])
    sequences: int = saved.fields["sequences"]
    return sequences


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off inside the ``with`` block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
