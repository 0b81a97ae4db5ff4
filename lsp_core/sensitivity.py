"""Measured sensitivity: the output KL that each truncation of one unit causes, the rest of the network dense.

The blocks are streamed: the dense input of block b is kept for all examples, and a candidate in block b runs block b
and what follows, with the blocks before it in its stack passing on what they are given. Exact, and about half of the
naive work; it is checked at every block that the dense model gives the same outputs that way, and where it does not,
candidates run the whole model. The teacher is kept as D + 2 numbers a position (``divergence``), never as logits.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.divergence import TeacherStatistic
from lsp_core.gram import NonFiniteError, evaluating
from lsp_core.inputs import Inputs
from lsp_core.readout import Readout
from lsp_core.units import Unit, find_stacks, weight_of

log = logging.getLogger(__name__)


def removal_counts(unit: Unit, points: int) -> tuple[int, ...]:
    """Returns the grid of removed counts k = round(i D / points), i = 1 .. points - 1, without duplicates, 0 or D."""
    counts = {round(i * unit.dimension / points) for i in range(1, points)}
    return tuple(sorted(counts - {0, unit.dimension}))


def counts_to_measure(unit: Unit, counts: Sequence[int]) -> tuple[int, ...]:
    """Returns the counts worth a measurement: those that save parameters, and the deepest that does not.

    A truncation that saves nothing can never be chosen; the deepest of them keeps the interpolation honest.
    """
    idle = [k for k in counts if unit.saved(k) <= 0]
    return tuple(k for k in counts if unit.saved(k) > 0 or k == max(idle))


class Sensitivity:
    """Measures Delta_u(k) of equation 4 of the paper, in nats per token, image or position, on ``examples`` (B, ...).

    ``bases`` holds the ordered basis (D, D) of each unit. Units are measured in the order of their blocks. ``inputs``:
    how the model reads the examples, none: as ``inputs_of`` says.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        units: Sequence[Unit],
        bases: Mapping[str, Tensor],
        examples: Tensor,
        *,
        micro_batch: int,
        inputs: Inputs | None = None,
    ) -> None:
        self.model = model
        self.units = {unit.name: unit for unit in units}
        self.bases = bases
        self.batches: list[Tensor] = [batch.to(model.device) for batch in examples.split(micro_batch)]
        self.stacks = find_stacks(model)
        self.blocks = [block for stack in self.stacks for block in stack]
        self.readout = Readout(model, inputs)
        self.block = 0
        self.streamed = True  # False: what lies before a block does not reach the output through its input alone
        self.inputs = [batch.new_empty(0) for batch in self.batches]  # dense input (B, T, D) of block ``self.block``
        self.extras: list[tuple[Any, ...] | None] = [None] * len(self.batches)  # beside it, in the stack's first block
        self.teacher: list[TeacherStatistic] = []
        called: list[int] = []
        with torch.inference_mode(), evaluating(model), ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                note = block.register_forward_pre_hook(lambda *_, number=number: called.append(number))
                stack.callback(note.remove)
            for index in range(len(self.batches)):
                outputs = self._keep(index, 0)
                self.teacher.append(self.readout.statistic(outputs))
                if index == 0:
                    self.dense_outputs = outputs
        if called != [*range(len(self.blocks))] * len(self.batches):
            self._stop_streaming("the blocks do not run once each, in order")

    def measure(self, name: str, count: int) -> float:
        """Returns the KL, in nats, of removing the last ``count`` directions of unit ``name`` alone.

        Errors: ``ValueError`` if the unit's block lies before one already measured; ``NonFiniteError``.
        """
        unit = self.units[name]
        self._advance_to(unit.block)
        removed = {name: count}
        with torch.inference_mode(), evaluating(self.model), truncated(self.model, removed, self.units, self.bases):
            return self._mean_kl(f"removing {count} directions of unit {name}", streamed=self.streamed)

    def joint(self, removed: Mapping[str, int]) -> float:
        """Returns the KL, in nats, of all of ``removed`` at once. Errors: ``NonFiniteError``."""
        with torch.inference_mode(), evaluating(self.model), truncated(self.model, removed, self.units, self.bases):
            return self._mean_kl("the joint allocation", streamed=False)

    def _mean_kl(self, what: str, *, streamed: bool) -> float:
        total, count = 0.0, 0
        for index, batch in enumerate(self.batches):
            outputs = self._from_block(index) if streamed else self.readout.outputs(batch)
            kl = self.readout.divergence(outputs, self.teacher[index], self.readout.kept(batch))
            total += kl.sum(dtype=torch.float64).item()
            count += kl.numel()
        if not math.isfinite(total):
            raise NonFiniteError(f"{what} gives a divergence of {total}")
        return total / count

    def _advance_to(self, block: int) -> None:
        if block == self.block or not self.streamed:
            return
        if block < self.block:
            raise ValueError(f"block {block} comes before block {self.block}, which is already measured: go in order")
        first = self._stack_of(block).start
        stops = (block,) if self.block >= first else (first, block)
        with torch.inference_mode(), evaluating(self.model):
            for stop in dict.fromkeys(stops):
                for index in range(len(self.batches)):
                    self._keep(index, stop, stop=True)
                self.block = stop
            if not self._streams():
                self._stop_streaming(f"block {block} reads more of the blocks before it than their hidden state")

    def _streams(self) -> bool:
        """Whether the dense model, run from ``self.block`` on, gives what it gives as a whole."""
        outputs, expected = self._from_block(0), self.dense_outputs
        tolerance = 8 * torch.finfo(expected.dtype).eps * expected.abs().max()  # the same products of the same numbers
        return bool((outputs - expected).abs().max() <= tolerance)

    def _stop_streaming(self, why: str) -> None:
        self.streamed = False
        log.warning("%s: %s: every candidate runs the whole model", type(self.model).__name__, why)

    def _stack_of(self, block: int) -> range:
        """Returns the blocks of the stack in which ``block`` lies."""
        first = 0
        for stack in self.stacks:
            if block < first + len(stack):
                return range(first, first + len(stack))
            first += len(stack)
        raise IndexError(block)

    def _keep(self, index: int, block: int, *, stop: bool = False) -> Tensor:
        """Keeps the dense input of ``block`` for one micro-batch; returns the outputs, of no use where it stops."""
        first = self._stack_of(block).start

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs[index] = args[0] if args else kwargs["hidden_states"]
            if stop and block != first:
                raise _Reached

        def note_extras(_: nn.Module, __: object, output: object) -> None:
            self.extras[index] = tuple(output[1:]) if isinstance(output, tuple) else None

        def keep_extras(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read = (*args, *kwargs.values())  # of attention weights that no block reads there may be much
            extras = self.extras[index] or ()
            kept = tuple(extra if any(extra is value for value in read) else None for extra in extras)
            self.extras[index] = None if self.extras[index] is None else kept
            if stop:
                raise _Reached

        with ExitStack() as stack:
            if first <= self.block < block:
                stack.enter_context(self._skipping(index))
            stack.callback(self.blocks[block].register_forward_pre_hook(keep, with_kwargs=True).remove)
            if block == first and block + 1 in self._stack_of(block):
                stack.callback(self.blocks[block].register_forward_hook(note_extras).remove)
                stack.callback(self.blocks[block + 1].register_forward_pre_hook(keep_extras, with_kwargs=True).remove)
            try:
                return self.readout.outputs(self.batches[index])
            except _Reached:
                return self.batches[index]

    def _from_block(self, index: int) -> Tensor:
        """Returns the outputs for one micro-batch, run from ``self.block`` on; stacks before its own run whole."""
        with self._skipping(index):
            return self.readout.outputs(self.batches[index])

    @contextmanager
    def _skipping(self, index: int) -> Iterator[None]:
        """Makes the blocks before ``self.block`` in its stack return what they are given, and itself read its input."""
        hidden, extras = self.inputs[index], self.extras[index]

        def passed_on(*args: Any, **kwargs: Any) -> Any:
            result = args[0] if args else kwargs["hidden_states"]
            return result if extras is None else (result, *extras)

        def given(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

        skipped = self.blocks[self._stack_of(self.block).start : self.block]
        originals: list[tuple[nn.Module, Callable[..., Any]]] = [(block, block.forward) for block in skipped]
        handle = self.blocks[self.block].register_forward_pre_hook(given, with_kwargs=True)
        try:
            for block, _ in originals:
                block.forward = passed_on
            yield
        finally:
            for block, _ in originals:
                del block.forward
            handle.remove()


class _Reached(Exception):  # noqa: N818  (no error)
    """Ends a forward pass at a block whose input is kept."""


@contextmanager
def truncated(
    model: nn.Module, removed: Mapping[str, int], units: Mapping[str, Unit], bases: Mapping[str, Tensor]
) -> Iterator[None]:
    """Replaces the members' weights by their projections W P or P W inside the ``with`` block."""
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for name, count in removed.items():
            if count == 0:
                continue
            unit = units[name]
            for member in unit.members:
                weight = weight_of(model.get_submodule(member))
                originals.append((weight, weight.clone()))
                weight.copy_(projected_weight(weight, bases[name], count, unit))
        yield
    finally:
        for weight, original in reversed(originals):
            weight.copy_(original)


def projected_weight(weight: Tensor, q: Tensor, count: int, unit: Unit) -> Tensor:  # (D_out, D_in)
    """Returns W P or P W with the last ``count`` columns of ``q`` (D, D) removed, in the dtype of ``q``."""
    weight = weight.to(q)
    kept, gone = q[:, : unit.dimension - count], q[:, unit.dimension - count :]
    if unit.side == "output":
        return kept @ (kept.T @ weight) if 2 * count > unit.dimension else weight - gone @ (gone.T @ weight)
    return (weight @ kept) @ kept.T if 2 * count > unit.dimension else weight - (weight @ gone) @ gone.T
