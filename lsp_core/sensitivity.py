"""Measured sensitivity: the output KL that each truncation of one unit causes, the rest of the network dense.

The blocks are streamed: the dense input of block b is kept for all tokens, and a candidate in block b runs block b and
what follows, with the blocks before it passing on what they are given. Exact, and about half of the naive work. The
teacher is kept as D + 2 numbers a token (``divergence``), never as logits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.divergence import TeacherStatistic
from lsp_core.gram import NonFiniteError, evaluating
from lsp_core.readout import Readout
from lsp_core.units import Unit, find_blocks, weight_of


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
    """Measures Delta_u(k) of equation 4 of the paper, in nats per token, on ``tokens`` (B, T).

    ``bases`` holds the ordered basis (D, D) of each unit. Units are measured in the order of their blocks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        units: Sequence[Unit],
        bases: Mapping[str, Tensor],
        tokens: Tensor,
        *,
        micro_batch: int,
    ) -> None:
        self.model = model
        self.units = {unit.name: unit for unit in units}
        self.bases = bases
        self.batches = [batch.to(model.device) for batch in tokens.split(micro_batch)]
        self.tokens = tokens.numel()
        self.blocks = find_blocks(model)
        self.readout = Readout(model)
        self.block = 0
        self.inputs: list[Tensor] = []  # dense input of block ``self.block``, one (B, T, D) a micro-batch
        self.teacher: list[TeacherStatistic] = []
        self.extras: int | None = None  # what a block returns beside the hidden state, None where it returns no tuple

        def note_extras(_: nn.Module, __: object, output: object) -> None:
            self.extras = len(output) - 1 if isinstance(output, tuple) else None

        handle = self.blocks[0].register_forward_hook(note_extras)
        with torch.inference_mode(), evaluating(model):
            for batch in self.batches:
                features, reached = self._run(batch, None, capture=0)
                self.inputs.append(reached)
                self.teacher.append(self.readout.statistic(features.flatten(0, 1)))
        handle.remove()

    def measure(self, name: str, count: int) -> float:
        """Returns the KL, in nats per token, of removing the last ``count`` directions of unit ``name`` alone.

        Errors: ``ValueError`` if the unit's block lies before one already measured; ``NonFiniteError``.
        """
        unit = self.units[name]
        self._advance_to(unit.block)
        removed = {name: count}
        with torch.inference_mode(), evaluating(self.model), truncated(self.model, removed, self.units, self.bases):
            return self._mean_kl(f"removing {count} directions of unit {name}", prefix=self.inputs)

    def joint(self, removed: Mapping[str, int]) -> float:
        """Returns the KL, in nats per token, of all of ``removed`` at once. Errors: ``NonFiniteError``."""
        with torch.inference_mode(), evaluating(self.model), truncated(self.model, removed, self.units, self.bases):
            return self._mean_kl("the joint allocation", prefix=None)

    def _mean_kl(self, what: str, *, prefix: list[Tensor] | None) -> float:
        total = 0.0
        for index, batch in enumerate(self.batches):
            features, _ = self._run(batch, None if prefix is None else prefix[index])
            kl = self.readout.divergence(features.flatten(0, 1), self.teacher[index])
            total += kl.sum(dtype=torch.float64).item()
        if not math.isfinite(total):
            raise NonFiniteError(f"{what} gives a divergence of {total}")
        return total / self.tokens

    def _advance_to(self, block: int) -> None:
        if block < self.block:
            raise ValueError(f"block {block} comes before block {self.block}, which is already measured: go in order")
        if block == self.block:
            return
        with torch.inference_mode(), evaluating(self.model):
            for index, batch in enumerate(self.batches):
                try:
                    self._run(batch, self.inputs[index], capture=block, stop=True)
                except _Reached as reached:
                    self.inputs[index] = reached.hidden
        self.block = block

    def _run(
        self, batch: Tensor, hidden: Tensor | None, *, capture: int | None = None, stop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Runs the model, from block ``self.block`` on if its input is ``hidden``; captures a block's input."""
        captured = batch.new_empty(0)

        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            nonlocal captured
            if stop:
                raise _Reached(args[0])
            captured = args[0]

        with ExitStack() as stack:
            if hidden is not None:
                stack.enter_context(_skipping(self.blocks, self.block, hidden, self.extras))
            if capture is not None:
                stack.callback(self.blocks[capture].register_forward_pre_hook(keep).remove)
            return self.readout.features(batch), captured


class _Reached(Exception):  # noqa: N818  (no error)
    """Ends a forward pass at a block's input."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@contextmanager
def _skipping(blocks: Sequence[nn.Module], first: int, hidden: Tensor, extras: int | None) -> Iterator[None]:
    """Makes the blocks before ``first`` return what they are given, and block ``first`` read ``hidden``."""

    def passed_on(*args: Any, **kwargs: Any) -> Any:
        result = args[0] if args else kwargs["hidden_states"]
        return result if extras is None else (result, *[None] * extras)

    def given(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (hidden, *args[1:])

    originals: list[tuple[nn.Module, Callable[..., Any]]] = [(block, block.forward) for block in blocks[:first]]
    handle = blocks[first].register_forward_pre_hook(given)
    try:
        for block, _ in originals:
            block.forward = passed_on
        yield
    finally:
        for block, _ in originals:
            del block.forward
        handle.remove()


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
        for weight, original in originals:
            weight.copy_(original)


def projected_weight(weight: Tensor, q: Tensor, count: int, unit: Unit) -> Tensor:  # (D_out, D_in)
    """Returns W P or P W with the last ``count`` columns of ``q`` (D, D) removed, in the dtype of ``q``."""
    weight = weight.to(q)
    kept, gone = q[:, : unit.dimension - count], q[:, unit.dimension - count :]
    if unit.side == "output":
        return kept @ (kept.T @ weight) if 2 * count > unit.dimension else weight - gone @ (gone.T @ weight)
    return (weight @ kept) @ kept.T if 2 * count > unit.dimension else weight - (weight @ gone) @ gone.T
