"""What training takes: the dense outputs, and the steps of all epochs. Conventions: as in ``costs``."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from lsp_core.costs import TOKEN_BYTES, basis_bytes, dtype_of, held_bytes, probe_cost, vector_bytes
from lsp_core.flops import (
    activation_form_flops,
    factor_form_flops,
    factor_products,
    orthogonal_flops,
)
from lsp_core.offload import rest_bytes, slot_sizes
from lsp_core.ownership import assign_owners, orthogonal_costs
from lsp_core.peaks import (
    most_loaded,
    slots,
    teacher_peak,
    training_peak,
)
from lsp_core.shapes import Cost, Shapes
from lsp_core.units import Unit

TEACHER_PART = 128  # sequences that the teacher's statistic is put together from


def teacher_cost(shapes: Shapes, *, sequences: int, length: int, micro_batch: int, offload: bool = False) -> Cost:
    """One forward pass and the statistic of each token; nothing is kept of a head that is not linear."""
    tokens = sequences * length
    probe = probe_cost(shapes)
    held = held_bytes(shapes, offload) + (slots(shapes) if offload else 0)
    if not shapes.keeps_teacher:
        return Cost(peak_bytes=held, read_bytes=shapes.stored_bytes)
    batch = shapes.examples(min(micro_batch, sequences), length)
    working = teacher_peak(shapes, batch)
    whole = tokens * shapes.statistic_bytes
    if shapes.on_host:  # parts are kept on the CPU and joined at the end, beside the pieces of the last
        last = min(sequences, TEACHER_PART) * length * shapes.statistic_bytes
        working = max(working + whole - len(batch) * length * shapes.statistic_bytes, 2 * whole + last) + 8 * tokens
    return Cost(
        flops=tokens * shapes.forward(length) + probe.flops,
        head_flops=tokens * shapes.statistic() + probe.head_flops,
        logits=float(tokens) * shapes.vocabulary,
        peak_bytes=held + working,
        read_bytes=shapes.stored_bytes + TOKEN_BYTES * tokens,
        written_bytes=whole,
    )


def train_cost(
    shapes: Shapes,
    units: Sequence[Unit],
    removed: Mapping[str, int],
    *,
    sequences: int,
    length: int,
    micro_batch: int,
    epochs: int,
    batch_sequences: int,
    validation_sequences: int,
    modulation_epochs: float,
    dropout: float,
    precision_bytes: int,
    epoch_sequences: int | None = None,
    objective: Literal["kl", "task"] = "kl",
    teacher_kept: bool = True,
    processes: int = 1,
    sharded: bool = False,
) -> Cost:
    """Forward and backward of every step in its form, the QR of each V a step, and a validation an epoch.

    Frozen weights take the gradient of their input alone, factors their own as well; attention's backward pass makes
    the scores again. An upper bound: an early stop saves the epochs after it. ``epoch_sequences``: drawn for each
    epoch, none: all. ``teacher_kept``: the dense outputs come from the store, else a dense pass is added. Checkpoints
    are not among the bytes written. Of several ``processes`` the peak is one's, all else is that of all; ``sharded``
    ones stay in the activation form and hold their part of the blocks, and two whole, the one that runs and the next.
    Errors: ``ValueError`` if nothing is removed.
    """
    active = [unit for unit in units if removed.get(unit.name, 0) > 0]
    if not active:
        raise ValueError("no unit loses a direction: there is nothing to train")
    tokens, checked = sequences * length, validation_sequences * length * (epochs + 1)
    drawn = min(epoch_sequences or sequences, sequences)
    steps_per_epoch = math.ceil(drawn / batch_sequences)
    steps = epochs * steps_per_epoch
    sharded = sharded and processes > 1
    modulated = steps if sharded else min(steps, max(0, math.ceil(modulation_epochs * steps_per_epoch) - 1))
    whole, rest = divmod(modulated, steps_per_epoch)
    first_form = length * (whole * drawn + rest * batch_sequences)  # tokens of the activation form
    second_form = epochs * drawn * length - first_form

    rank = {u.name: u.dimension - removed[u.name] for u in active}
    # a direction that some member's mask keeps widens the factors of all
    wider = {u.name: rank[u.name] + removed[u.name] * (1 - (1 - dropout) ** len(u.members)) for u in active}
    gradient = first_form * activation_form_flops(shapes, active, removed, length)
    gradient += second_form * factor_form_flops(shapes, active, wider, length)
    orthogonality = steps * sum(6.0 * u.dimension * removed[u.name] ** 2 for u in active)
    making = sum(4.0 * (steps - modulated) * wider[u.name] * u.parameters for u in active)  # W E, and back to E
    making += sum(2.0 * (epochs + 1) * rank[u.name] * u.parameters for u in active)
    compressed = shapes.forward(length) + 2.0 * sum(factor_products(u, rank[u.name]) - u.parameters for u in active)
    probe = probe_cost(shapes)
    flops = gradient + checked * compressed + orthogonality + making + probe.flops
    targets = epochs * drawn * (length - (objective == "task"))
    predicted = checked - validation_sequences * (epochs + 1)
    heads = targets * 2 * shapes.logits() + predicted * shapes.logits() + probe.head_flops
    softmaxes = targets + predicted
    if objective == "kl" and not teacher_kept:
        flops += epochs * drawn * length * shapes.forward(length)
        heads += epochs * drawn * length * shapes.statistic()
        softmaxes += epochs * drawn * length
    products, solvers = orthogonal_flops(active, removed, steps, steps - modulated, epochs + 1)

    step = -(-min(batch_sequences, drawn) // processes)  # sequences of a step that one process takes
    micro_batch = min(micro_batch, step)
    working = training_peak(
        shapes,
        units,
        removed,
        shapes.examples(processes * min(2 * micro_batch, step), length),
        micro_batch=micro_batch,
        modulated=modulated > 0,
        precision=dtype_of(precision_bytes),
        objective=objective,
        dropout=dropout,
        teacher_kept=teacher_kept,
        processes=processes,
        sharded=sharded,
    )
    statistic = tokens * shapes.statistic_bytes if objective == "kl" and teacher_kept and shapes.keeps_teacher else 0
    vectors, bases = vector_bytes(shapes, active, removed), basis_bytes(units, precision_bytes)
    ids = tokens + validation_sequences * length
    if shapes.on_host:
        owners = assign_owners(orthogonal_costs(units, removed), processes)
        member = most_loaded(units, owners)
        owned = [unit for unit in active if owners[unit.name] == member]  # of the others no basis is read
        own = vector_bytes(shapes, owned, removed)  # the best V, and the one that takes its place
        working += basis_bytes(owned, precision_bytes) + statistic + 2 * own + 8 * ids
    held = shapes.weight_bytes
    if sharded:
        outside = rest_bytes(shapes.model)
        held = outside + (held - outside) // processes + 2 * max(slot_sizes(shapes.model))
    return Cost(
        flops=flops,
        gradient_flops=gradient,
        head_flops=heads,
        flops64=products,
        solver_flops=solvers,
        logits=float(softmaxes) * shapes.vocabulary,
        peak_bytes=max(held + working, shapes.weight_bytes if shapes.on_host else 0),  # there it begins whole
        processes=processes,
        read_bytes=shapes.stored_bytes + bases + statistic + TOKEN_BYTES * ids,
        written_bytes=vectors,
    )
