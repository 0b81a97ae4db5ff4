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
    inputs = inputs or inputs_of(model)
    sums = Sums(model, units, precision)
    with torch.inference_mode(), evaluating(model), sums.watching(units):
        file = None if work is None else work / FILE
        run = run_of(examples, inputs, precision)
        done = saved = 0 if file is None else load_sums(file, sums.grams, run)
        for batch in examples[done:].split(micro_batch):
            batch = batch.to(model.device)
            sums.leave_out_padding(inputs.kept(batch))
            model.base_model(**inputs.arguments(batch, model))
            done += len(batch)
            if progress is not None:
                progress(done, len(examples))
            if file is not None and done - saved >= checkpoint_sequences and done < len(examples):
                write_durably(file, sums.grams, {"sequences": done, "run": run})
                saved = done
                if on_checkpoint is not None:
                    on_checkpoint()
    return sums.grams


class Sums:
    """Gram matrices of ``units``, on the device of ``model``, that its forward passes add to while they are watched."""

    def __init__(self, model: PreTrainedModel, units: Sequence[Unit], precision: torch.dtype) -> None:
        made: dict[str, Any] = {"dtype": precision, "device": model.device}
        self.grams = {unit.name: torch.zeros(unit.dimension, unit.dimension, **made) for unit in units}
        self._layers = {name: model.get_submodule(name) for unit in units for name in unit.members}
        self._kept: Tensor | None = None

    def leave_out_padding(self, kept: Tensor | None) -> None:  # (B, T)
        """Tells which positions of the next micro-batch count, none: all."""
        self._kept = None if kept is None else kept.reshape(-1)

    @contextmanager
    def watching(self, units: Sequence[Unit]) -> Iterator[None]:
        """Adds what the layers of ``units`` read or give inside the ``with`` block."""
        with ExitStack() as stack:
            for unit in units:
                for handle in self._watch(unit):
                    stack.callback(handle.remove)
            yield

    def _watch(self, unit: Unit) -> Iterator[torch.utils.hooks.RemovableHandle]:
        gram = self.grams[unit.name]
        if unit.side == "input":  # one Gram serves the group, its members read the same tensor
            name = unit.members[0]
            yield self._layers[name].register_forward_pre_hook(lambda _, args: self._add(name, gram, args[0]))
            return
        for name in unit.members:

            def hook(module: nn.Module, _: object, output: Tensor, name: str = name) -> None:
                bias = bias_of(module)
                self._add(name, gram, output if bias is None else output - bias)

            yield self._layers[name].register_forward_hook(hook)

    def _add(self, name: str, gram: Tensor, activation: Tensor) -> None:
        rows = activation.detach().reshape(-1, activation.shape[-1])
        if self._kept is not None:
            if len(rows) != len(self._kept):
                raise ValueError(
                    f"layer {name} reads {len(rows)} positions of {len(self._kept)} tokens, so padding cannot be left "
                    "out: exclude it by discovery.exclude"
                )
            rows = rows[self._kept]
        rows = rows.to(gram.dtype)
        gram.addmm_(rows.T, rows)
        if not torch.isfinite(gram.diagonal()).all():
            raise NonFiniteError(f"layer {name} produces a NaN or an infinity: check the model's weights and dtype")


def run_of(examples: Tensor, inputs: Inputs, precision: torch.dtype) -> dict[str, str]:
    """Returns what saved sums have to be of, beside their units, to be continued."""
    return {"precision": str(precision), "inputs": repr(inputs), "examples": digest_tensors({"examples": examples})}


def load_sums(file: Path, grams: Mapping[str, Tensor], run: Mapping[str, Any]) -> int:
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
