"""The working memory of each stage at its peak, in bytes beside the weights: the stage's own functions, run dry.

Every function runs one micro-batch, or one unit of each shape; what grows with the number of sequences is left to the
caller. Bases and grids are counted where the stage keeps them on the device.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lsp_core.basis import Init, ordered_basis
from lsp_core.block_grams import gather_by_blocks
from lsp_core.distributed import Group, T
from lsp_core.divergence import TeacherStatistic
from lsp_core.dryrun import peak_bytes
from lsp_core.exchange import Exchange
from lsp_core.fisher import Fisher
from lsp_core.gram import evaluating, gather_grams
from lsp_core.losses import sum_losses
from lsp_core.merging import merge_model, projected_outputs
from lsp_core.offload import offloaded, slot_sizes
from lsp_core.ownership import assign_owners, orthogonal_costs
from lsp_core.projector import attached
from lsp_core.sensitivity import Sensitivity
from lsp_core.shapes import META, Shapes
from lsp_core.teacher import cache_teacher
from lsp_core.training import Trainer, frozen
from lsp_core.training_settings import TrainingSettings
from lsp_core.units import Unit, weight_of


def gather_peak(
    shapes: Shapes, units: Sequence[Unit], batch: Tensor, precision: torch.dtype, *, offload: bool = False
) -> int:
    """Gram matrices, and a forward pass with the activations in ``precision``; ``batch`` (B, T) of tokens.

    With ``offload`` those of the block that needs most, and the slots.
    """
    options: dict[str, Any] = {"micro_batch": len(batch), "precision": precision, "inputs": shapes.inputs}
    if not offload:
        return peak_bytes(partial(gather_grams, shapes.model, units, batch, **options))
    by_kind = {tuple(_kind(u) for u in units if u.block == unit.block): unit.block for unit in reversed(units)}
    peak = 0
    with offloaded(shapes.model, META):
        for block in by_kind.values():
            chosen = [unit for unit in units if unit.block == block]
            peak = max(peak, peak_bytes(partial(gather_by_blocks, shapes.model, chosen, batch, **options)))
    return peak + second_slot(shapes)


def second_slot(shapes: Shapes) -> int:
    """Bytes of the slot that the next block is copied into, off the CPU."""
    return 0 if shapes.on_host else max(slot_sizes(shapes.model))


def slots(shapes: Shapes, units: Iterable[Unit] = (), removed: Mapping[str, int] | None = None) -> int:
    """Bytes of all slots, one on the CPU and two elsewhere, of the blocks as ``removed`` leaves them."""
    saved = Counter[int]()
    for unit in units:
        saved[unit.block] += unit.saved((removed or {}).get(unit.name, 0)) * shapes.dtype.itemsize
    largest = max(size - saved[block] for block, size in enumerate(slot_sizes(shapes.model)))
    return largest * (1 if shapes.on_host else 2)


def bases_peak(
    shapes: Shapes, units: Sequence[Unit], precision: torch.dtype, init: Init, *, offload: bool = False
) -> int:
    """The most demanding unit's Gram and decompositions; with ``offload`` its weights too."""

    def one(unit: Unit) -> None:
        gram = torch.empty(unit.dimension, unit.dimension, dtype=precision, device=META)
        weights = [weight_of(shapes.model.get_submodule(member)).detach() for member in unit.members]
        if offload and not shapes.on_host:
            weights = [torch.empty_like(weight) for weight in weights]
        ordered_basis(unit, gram, weights, init=init)

    return max((peak_bytes(partial(one, unit), lapack=shapes.on_host) for unit in distinct(units)), default=0)


def measure_peak(
    shapes: Shapes, units: Sequence[Unit], batch: Tensor, precision: torch.dtype, *, offload: bool = False
) -> int:
    """A basis, on the CPU all; a block's input and the teacher's statistic of ``batch``; a candidate; the slots."""

    def some() -> None:
        bases = _bases_where_used(shapes, units, precision)
        sensitivity = Sensitivity(shapes.model, units, bases, batch, micro_batch=len(batch), inputs=shapes.inputs)
        for unit in distinct(units):
            sensitivity.measure(unit.name, max(1, unit.dimension // 2))

    return _offloaded_peak(shapes, some) if offload else peak_bytes(some)


def _offloaded_peak(shapes: Shapes, run: Callable[[], object]) -> int:
    """What ``run`` takes on the device, where the blocks' weights are not, and the slots."""
    with offloaded(shapes.model, META) as placed:
        homes = [] if shapes.on_host else [home.buffer for home in placed.homes]
        return peak_bytes(run, host=homes) + second_slot(shapes)


def fisher_peak(shapes: Shapes, units: Sequence[Unit], example: Tensor, precision: torch.dtype) -> int:
    """All bases, a squared gradient a weight, the passes over one ``example`` (1, T), and a candidate."""

    def some() -> None:
        fisher = Fisher(shapes.model, units, empty_bases(units, precision), example.to(META), inputs=shapes.inputs)
        for unit in distinct(units):
            fisher.measure(unit.name, max(1, unit.dimension // 2))

    return peak_bytes(some)


def joint_peak(
    shapes: Shapes,
    units: Sequence[Unit],
    removed: Mapping[str, int],
    batch: Tensor,
    precision: torch.dtype,
    *,
    offload: bool = False,
) -> int:
    """A basis, on the CPU all; the weights that the truncation sets aside, and a pass over ``batch``; the slots."""

    def joint() -> None:
        bases = _bases_where_used(shapes, units, precision)
        Sensitivity(shapes.model, units, bases, batch, micro_batch=len(batch), inputs=shapes.inputs).joint(removed)

    return _offloaded_peak(shapes, joint) if offload else peak_bytes(joint)


def teacher_peak(shapes: Shapes, batch: Tensor) -> int:
    """A forward pass and the statistic of ``batch``."""
    return peak_bytes(partial(cache_teacher, shapes.model, batch, micro_batch=len(batch), inputs=shapes.inputs))


def perplexity_peak(shapes: Shapes, batch: Tensor) -> int:
    """A forward pass, the logits, their losses in float32 and the check that they are finite."""
    if shapes.kind == "lm":
        return peak_bytes(partial(sum_losses, shapes.model, batch, range(len(batch))))

    @torch.inference_mode()
    def forward() -> None:
        shapes.model(**shapes.inputs.arguments(batch, shapes.model))

    return peak_bytes(forward)


def training_peak(
    shapes: Shapes,
    units: Sequence[Unit],
    removed: Mapping[str, int],
    tokens: Tensor,
    *,
    micro_batch: int,
    modulated: bool,
    precision: torch.dtype,
    objective: Literal["kl", "task"],
    dropout: float,
    teacher_kept: bool,
    processes: int = 1,
    sharded: bool = False,
) -> int:
    """V, U, the leaves and their gradients, Adam's moments, and what a micro-batch keeps for its backward pass.

    ``tokens``: one optimizer step of two micro-batches a process, where there are two: gradients wait for the second.
    Of several ``processes`` the one whose units are the largest; ``sharded`` ones stay in the activation form. Off the
    CPU the kept directions of the bases are copied to the device, on it they are views.
    """
    owners = assign_owners(orthogonal_costs(units, removed), processes)
    rank = most_loaded(units, owners)
    owned = [name for name, owner in owners.items() if owner == rank]
    bases = empty_bases(units, precision)
    teacher = None
    labels = torch.zeros(len(tokens), dtype=torch.long) if shapes.kind == "classifier" else None
    if objective == "kl" and teacher_kept and shapes.keeps_teacher:
        positions = shapes.positions or tokens.shape[1]
        if shapes.inputs.decoder_start is not None:
            positions = shapes.inputs.targets(tokens).shape[1]
        m = torch.empty(len(tokens), positions, shapes.hidden, dtype=_wide(shapes), device=META)
        teacher = TeacherStatistic(m=m, c=m[..., 0], entropy=m[..., 0])
    settings = TrainingSettings(
        learning_rate=1e-3,
        objective=objective,
        epochs=2,
        batch_sequences=len(tokens),
        micro_batch=micro_batch,
        modulation_epochs=2.0 if modulated else 0.0,  # then the first of the two steps is in the activation form
        dropout=dropout,
    )

    def steps() -> None:
        model = shapes.model
        with attached(model, units, bases, removed, owned) as projectors, frozen(model), evaluating(model):
            group = _Member(rank=rank, size=processes)
            trainer = Trainer(
                model,
                projectors,
                tokens,
                tokens,
                settings,
                inputs=shapes.inputs,
                labels=labels,
                teacher=teacher,
                exchange=Exchange(group=group, projectors=projectors, owners=owners),
                sharding="sharded" if sharded else "replicated",
            )
            for step in range(2):
                trainer.accumulate(step)
                trainer.update()

    active = [unit for unit in units if unit.name in owned]
    started = sum(u.dimension * (u.dimension - removed[u.name]) for u in active) * precision.itemsize
    return peak_bytes(steps) + (0 if shapes.on_host else started)


class _Member(Group):
    """One process of a group whose others are not there: what they would send is taken to have come."""

    def sums(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def from_process(self, value: T, source: int) -> T:
        return value

    def raise_together(self, error: Exception | None) -> None:
        assert error is None

    def broadcast(self, tensor: Tensor, source: int) -> None:
        return None

    def reduce(self, tensor: Tensor, target: int | None) -> None:
        return None


def most_loaded(units: Iterable[Unit], owners: Mapping[str, int]) -> int:
    """Returns the process whose units have the largest bases together."""
    loads = Counter[int]()
    for unit in units:
        if unit.name in owners:
            loads[owners[unit.name]] += unit.dimension**2
    return max(loads, key=lambda process: (loads[process], -process))


def projecting_peak(shapes: Shapes, units: Sequence[Unit], removed: Mapping[str, int], batch: Tensor) -> int:
    """Complete bases and projectors of every unit, and a pass over ``batch``."""
    vectors = _vectors(shapes, units, removed)
    return peak_bytes(partial(projected_outputs, shapes.model, units, vectors, batch.to(META)))


def merging_peak(shapes: Shapes, units: Sequence[Unit], removed: Mapping[str, int]) -> int:
    """The most demanding unit's factors, in float64 on the way."""
    peak = 0
    model = copy.deepcopy(shapes.model)
    for unit in distinct(unit for unit in units if removed.get(unit.name, 0) > 0):
        peak = max(peak, peak_bytes(partial(merge_model, model, [unit], _vectors(shapes, [unit], removed))))
    return peak


def distinct(units: Iterable[Unit]) -> list[Unit]:
    """Returns one unit of each shape, in the order of the forward pass."""
    found: dict[tuple[str, int, tuple[int, ...]], Unit] = {}
    for unit in units:
        found.setdefault(_kind(unit), unit)
    return list(found.values())


def _kind(unit: Unit) -> tuple[str, int, tuple[int, ...]]:
    return unit.side, unit.dimension, unit.others


def empty_bases(units: Iterable[Unit], precision: torch.dtype) -> dict[str, Tensor]:
    """Returns a basis (D, D) on the meta device for each unit."""
    return {unit.name: torch.empty(unit.dimension, unit.dimension, dtype=precision, device=META) for unit in units}


class _OneAtATime(Mapping[str, Tensor]):
    """Bases that are copied to the device where they are used."""

    def __init__(self, units: Iterable[Unit], precision: torch.dtype) -> None:
        self._dimensions = {unit.name: unit.dimension for unit in units}
        self._precision = precision

    def __getitem__(self, name: str) -> Tensor:
        dimension = self._dimensions[name]
        return torch.empty(dimension, dimension, dtype=self._precision, device=META)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dimensions)

    def __len__(self) -> int:
        return len(self._dimensions)


def _bases_where_used(shapes: Shapes, units: Iterable[Unit], precision: torch.dtype) -> Mapping[str, Tensor]:
    return empty_bases(units, precision) if shapes.on_host else _OneAtATime(units, precision)


def _vectors(shapes: Shapes, units: Iterable[Unit], removed: Mapping[str, int]) -> dict[str, Tensor]:
    chosen = [(unit, removed.get(unit.name, 0)) for unit in units]
    return {u.name: torch.empty(u.dimension, k, dtype=_wide(shapes), device=META) for u, k in chosen if k > 0}


def _wide(shapes: Shapes) -> torch.dtype:
    return torch.promote_types(shapes.dtype, torch.float32)
