"""Measured sensitivity: the output KL that each truncation of one unit causes, the rest of the network dense.

The blocks are streamed (``streaming``): a candidate in block b runs block b and what follows. Exact, and about half of
the naive work; where it is not exact, candidates run the whole model. The teacher is kept as D + 2 numbers a position
(``divergence``), never as logits. Truncations are computed on the model's device, wherever weights and bases are.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.divergence import TeacherStatistic
from lsp_core.gram import NonFiniteError, evaluating
from lsp_core.inputs import Inputs
from lsp_core.readout import Readout
from lsp_core.streaming import Stream
from lsp_core.units import Unit, weight_of


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
    how the model reads the examples, none: as ``inputs_of`` says. ``home``: where hidden states and the teacher wait,
    none: on the model's device.
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
        home: torch.device | None = None,
    ) -> None:
        self.model = model
        self.units = {unit.name: unit for unit in units}
        self.bases = bases
        self.readout = Readout(model, inputs)
        self.home = home
        self.batches: list[Tensor] = [batch.to(model.device) for batch in examples.split(micro_batch)]
        self.stream = Stream(model, self.batches, self.readout.outputs, home=home)
        self.teacher: list[TeacherStatistic] = []
        with torch.inference_mode(), evaluating(model):
            for index in range(len(self.batches)):
                statistic = self.readout.statistic(self.stream.begin(index))
                self.teacher.append(statistic if home is None else statistic.to(home))

    def measure(self, name: str, count: int) -> float:
        """Returns the KL, in nats, of removing the last ``count`` directions of unit ``name`` alone.

        Errors: ``ValueError`` if the unit's block lies before one already measured; ``NonFiniteError``.
        """
        unit = self.units[name]
        removed = {name: count}
        sums: list[tuple[float, int]] = []
        with torch.inference_mode(), evaluating(self.model):
            self.stream.advance_to(unit.block)
            with truncated(self.model, removed, self.units, self.bases):
                what = f"removing {count} directions of unit {name}"
                self._sum(what, lambda *found: sums.append(found), streamed=self.stream.possible)
        return _mean(sums)

    def joint(self, removed: Mapping[str, int]) -> float:
        """Returns the KL, in nats, of all of ``removed`` at once. Errors: ``NonFiniteError``."""
        sums: list[tuple[float, int]] = []
        self.joint_sums(removed, lambda *found: sums.append(found))
        return _mean(sums)

    def joint_sums(self, removed: Mapping[str, int], take: Callable[[float, int], None]) -> None:
        """Calls ``take`` with that KL added up over each micro-batch, in float64, and over how many distributions.

        Errors: ``NonFiniteError``.
        """
        with torch.inference_mode(), evaluating(self.model), truncated(self.model, removed, self.units, self.bases):
            self._sum("the joint allocation", take, streamed=False)

    def _sum(self, what: str, take: Callable[[float, int], None], *, streamed: bool) -> None:
        for index, batch in enumerate(self.batches):
            outputs = self.stream.from_block(index) if streamed else self.readout.outputs(batch)
            teacher = self.teacher[index] if self.home is None else self.teacher[index].to(self.model.device)
            kl = self.readout.divergence(outputs, teacher, self.readout.kept(batch))
            total = kl.sum(dtype=torch.float64).item()
            if not math.isfinite(total):
                raise NonFiniteError(f"{what} gives a divergence of {total}")
            take(total, kl.numel())


def _mean(sums: Sequence[tuple[float, int]]) -> float:
    total, count = 0.0, 0
    for value, number in sums:
        total += value
        count += number
    return total / count


@contextmanager
def truncated(
    model: PreTrainedModel, removed: Mapping[str, int], units: Mapping[str, Unit], bases: Mapping[str, Tensor]
) -> Iterator[None]:
    """Replaces the members' weights by their projections W P or P W inside the ``with`` block."""
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for name, count in removed.items():
            if count == 0:
                continue
            unit, q = units[name], bases[name].to(model.device)
            for member in unit.members:
                weight = weight_of(model.get_submodule(member))
                originals.append((weight, weight.clone()))
                weight.copy_(projected_weight(weight, q, count, unit))
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
