"""What each stage costs: FLOPs, peak memory and bytes, from shapes alone.

FLOPs are formulas: 2 a multiply-add of every matrix product, the decompositions by LAPACK's leading terms, attention
4 x context x width x blocks a token (not halved for causality); elementwise work, embeddings and rotary angles are not
counted. Memory is found by ``dryrun``: the stage's own functions run on the meta device for one micro-batch, and what
grows with the number of sequences is added.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lsp_core.basis import Init, ordered_basis
from lsp_core.divergence import TeacherStatistic
from lsp_core.dryrun import peak_bytes
from lsp_core.gram import evaluating, gather_grams
from lsp_core.merging import merge_model, projected_logits
from lsp_core.projector import attached
from lsp_core.sensitivity import Sensitivity, counts_to_measure, removal_counts
from lsp_core.shapes import META, Cost, Shapes
from lsp_core.teacher import cache_teacher
from lsp_core.training import Trainer, TrainingSettings, frozen
from lsp_core.units import Unit, weight_of

TOKEN_BYTES = 4  # a token id in the store
PROBE = 8  # tokens of the two passes that check the head
MERGE_PROBE = 16  # tokens of the two passes that check a merge
EIGH = 9  # D^3 of a symmetric eigendecomposition: 4/3 to a tridiagonal matrix, 2 back, the rest between


def calibrate_cost(*, sequences: int, length: int, text_bytes: int) -> Cost:
    """Reads and tokenizes ``text_bytes`` of text, writes the token ids."""
    return Cost(
        peak_bytes=2 * text_bytes + 8 * sequences * length,
        read_bytes=text_bytes,
        written_bytes=TOKEN_BYTES * sequences * length,
        text_bytes=text_bytes,
    )


def gather_cost(
    shapes: Shapes, units: Sequence[Unit], *, sequences: int, length: int, micro_batch: int, precision_bytes: int
) -> Cost:
    """One forward pass without the head; a D x D product a token for each Gram, and member of an output tie."""
    tokens = sequences * length
    grams = sum(2.0 * u.dimension**2 * (len(u.members) if u.side == "output" else 1) for u in units)
    batch = _tokens(min(micro_batch, sequences), length)
    precision = _precision(precision_bytes)
    working = peak_bytes(lambda: gather_grams(shapes.model, units, batch, micro_batch=micro_batch, precision=precision))
    return Cost(
        flops=tokens * shapes.forward(length),
        flops64=tokens * grams,
        peak_bytes=shapes.weight_bytes + working + (8 * tokens if shapes.on_host else 0),
        read_bytes=shapes.stored_bytes + TOKEN_BYTES * tokens,
        written_bytes=_basis_bytes(units, precision_bytes),
    )


def bases_cost(shapes: Shapes, units: Sequence[Unit], *, precision_bytes: int, init: Init = "whitened") -> Cost:
    """An eigendecomposition a unit; for an input side also Cholesky, WbarT Wbar, ST(..)S, S V and its QR.

    A Gram that needs a ridge takes a few decompositions more, which are not counted.
    """
    products = solvers = 0.0
    for unit in units:
        cube = float(unit.dimension) ** 3
        solvers += EIGH * cube
        if unit.side == "input" and init == "whitened":
            products += 2.0 * unit.dimension * unit.parameters + 6 * cube
            solvers += (1 / 3 + 8 / 3) * cube
    precision, model = _precision(precision_bytes), shapes.model

    def one(unit: Unit) -> None:
        gram = torch.empty(unit.dimension, unit.dimension, dtype=precision, device=META)
        ordered_basis(unit, gram, [weight_of(model.get_submodule(m)).detach() for m in unit.members], init=init)

    working = max((peak_bytes(lambda u=unit: one(u)) for unit in _distinct(units)), default=0)
    kept = _basis_bytes(units, precision_bytes)  # all of them, on the CPU, until they are saved
    return Cost(
        flops64=products,
        solver_flops=solvers,
        peak_bytes=shapes.weight_bytes + working + (kept if shapes.on_host else 0),
        read_bytes=shapes.stored_bytes + kept,
        written_bytes=kept,
    )


def measure_cost(
    shapes: Shapes,
    units: Sequence[Unit],
    *,
    points: int,
    sequences: int,
    length: int,
    micro_batch: int,
    precision_bytes: int,
) -> Cost:
    """The dense pass with its statistic, one pass over each block but the last to keep its input, and the candidates.

    A candidate in block b is a projected weight, the blocks b .. L-1 and the head.
    """
    tokens = sequences * length
    counts = {unit.name: counts_to_measure(unit, removal_counts(unit, points)) for unit in units}
    candidates = sum(len(counts[u.name]) for u in units)
    last = max(unit.block for unit in units)
    flops = shapes.forward(length) + (shapes.forward(length) - shapes.forward(length, last))
    flops += sum(len(counts[u.name]) * shapes.forward(length, u.block) for u in units)
    heads = shapes.statistic() + candidates * shapes.logits()
    probe = _probe(shapes)
    model, batch = shapes.model, _tokens(min(micro_batch, sequences), length)

    def some() -> None:
        bases = _empty_bases(units, precision_bytes)
        sensitivity = Sensitivity(model, units, bases, batch, micro_batch=micro_batch)
        for unit in _distinct(units):
            sensitivity.measure(unit.name, max(1, unit.dimension // 2))

    kept = (sequences - len(batch)) * length * _streamed_bytes(shapes)
    return Cost(
        flops=tokens * flops + probe.flops,
        head_flops=tokens * heads + probe.head_flops,
        flops64=sum(_projection_flops(u, k) for u in units for k in counts[u.name]),
        logits=tokens * (1 + candidates) * float(shapes.vocabulary),
        peak_bytes=shapes.weight_bytes + peak_bytes(some) + kept,
        read_bytes=shapes.stored_bytes + _basis_bytes(units, precision_bytes) + TOKEN_BYTES * tokens,
        written_bytes=len(units) * (points - 1) * (8 + 1 + 8),
    )


def allocate_cost(units: Sequence[Unit], *, points: int) -> Cost:
    """Next to nothing: the grid is read, one count a unit written."""
    return Cost(read_bytes=len(units) * (points - 1) * (8 + 1 + 8), written_bytes=64 * len(units))


def teacher_cost(shapes: Shapes, *, sequences: int, length: int, micro_batch: int) -> Cost:
    """One forward pass and the statistic of each token; nothing is kept of a head that is not linear."""
    tokens = sequences * length
    probe = _probe(shapes)
    if not shapes.linear_head:
        return Cost(peak_bytes=shapes.weight_bytes, read_bytes=shapes.stored_bytes)
    batch = _tokens(min(micro_batch, sequences), length)
    working = peak_bytes(lambda: cache_teacher(shapes.model, batch, micro_batch=micro_batch))
    whole = tokens * shapes.statistic_bytes
    if shapes.on_host:  # the parts are kept on the CPU, and joined at the end
        working = max(working + whole - batch.numel() * shapes.statistic_bytes, 2 * whole) + 8 * tokens
    return Cost(
        flops=tokens * shapes.forward(length) + probe.flops,
        head_flops=tokens * shapes.statistic() + probe.head_flops,
        logits=float(tokens) * shapes.vocabulary,
        peak_bytes=shapes.weight_bytes + working,
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
    objective: Literal["kl", "task"] = "kl",
    teacher_kept: bool = True,
) -> Cost:
    """Forward and backward of every step in its form, the QR of each V a step, and a validation an epoch.

    Frozen weights take the gradient of their input alone, factors their own as well; attention's backward pass makes
    the scores again. An upper bound: an early stop saves the epochs after it. ``teacher_kept``: the dense outputs come
    from the store, else a dense pass is added. Checkpoints are not among the bytes written.
    """
    active = [unit for unit in units if removed.get(unit.name, 0) > 0]
    rank = {u.name: u.dimension - removed[u.name] for u in active}
    step_rank = {
        u.name: rank[u.name] + removed[u.name] * (1 - (1 - dropout) ** len(u.members)) for u in active
    }  # the directions that some member's mask keeps widen the factors
    steps_per_epoch = math.ceil(sequences / batch_sequences)
    steps = epochs * steps_per_epoch
    modulated = min(steps, max(0, math.ceil(modulation_epochs * steps_per_epoch) - 1))

    def tokens_of(count: int) -> float:
        whole, rest = divmod(count, steps_per_epoch)
        return length * (whole * sequences + min(rest * batch_sequences, sequences))

    factored, first = tokens_of(steps) - tokens_of(modulated), active[0]
    dense = shapes.forward(length)
    back = (shapes.forward(length, first.block)) + 1.5 * shapes.attend(length) * (len(shapes.blocks) - first.block)
    forms = {  # products that a unit takes a token, in place of its dense ones
        "activation": {
            u.name: removed[u.name] * u.dimension * (len(u.members) * (2 if u.side == "output" else 1))
            + (removed[u.name] * u.dimension if u.side == "input" else 0)
            for u in active
        },
        "factor": {u.name: _factor_products(u, step_rank[u.name]) for u in active},
        "validation": {u.name: _factor_products(u, rank[u.name]) for u in active},
    }
    replaced = 2.0 * sum(unit.parameters for unit in active)
    modulation, factors, validation = (2.0 * sum(form.values()) for form in forms.values())
    flops = tokens_of(modulated) * (dense + modulation + back + 2 * modulation)
    flops += factored * (dense - replaced + factors + back - replaced + 2 * factors)
    flops += factored * -2.0 * step_rank[first.name] * _unread_inputs(first)
    flops += (
        tokens_of(modulated)
        * -2.0
        * (removed[first.name] * first.dimension if first.side == "input" else first.parameters)
    )
    tokens, checks = sequences * length, validation_sequences * length * (epochs + 1)
    flops += checks * (dense - replaced + validation)
    targets = epochs * sequences * (length - (objective == "task"))
    heads = targets * 2 * shapes.logits() + checks / length * (length - 1) * shapes.logits()
    softmaxes = targets + checks / length * (length - 1)
    if objective == "kl" and not teacher_kept:
        flops += epochs * tokens * dense
        heads += epochs * tokens * shapes.statistic()
        softmaxes += epochs * tokens
    for u in active:
        k, r = removed[u.name], rank[u.name]
        flops += steps * 6.0 * u.dimension * k**2  # the orthogonality penalty
        flops += (steps - modulated) * 4.0 * step_rank[u.name] * u.parameters + (epochs + 1) * 2.0 * r * u.parameters
    products, solvers = _orthogonal_flops(active, removed, steps, steps - modulated, epochs + 1)
    probe = _probe(shapes)
    peak = _training_peak(
        shapes,
        units,
        removed,
        length=length,
        micro_batch=min(micro_batch, sequences),
        batch=min(batch_sequences, sequences),
        modulated=modulated > 0,
        precision=_precision(precision_bytes),
        objective=objective,
        dropout=dropout,
        teacher_kept=teacher_kept,
    )
    statistic = tokens * shapes.statistic_bytes if objective == "kl" and teacher_kept else 0
    vectors = _vector_bytes(shapes, units, removed)
    bases = _basis_bytes(units, precision_bytes)
    if shapes.on_host:
        peak += bases + statistic + 2 * vectors + 8 * (tokens + validation_sequences * length)
    return Cost(
        flops=flops + probe.flops,
        head_flops=heads + probe.head_flops,
        flops64=products,
        solver_flops=solvers,
        logits=softmaxes * shapes.vocabulary,
        peak_bytes=peak,
        read_bytes=shapes.stored_bytes + bases + statistic + TOKEN_BYTES * (tokens + validation_sequences * length),
        written_bytes=vectors,
    )


def merge_cost(shapes: Shapes, units: Sequence[Unit], removed: Mapping[str, int], *, precision_bytes: int) -> Cost:
    """Two complete QRs, U_perpT W, U UT W and the check a unit, in float64, and two short forward passes.

    On the CPU whatever the device, whose peak is 0 then.
    """
    probe = MERGE_PROBE * shapes.forward(MERGE_PROBE) * 2
    vectors = _vector_bytes(shapes, units, removed)
    saved = sum(unit.saved(removed.get(unit.name, 0)) for unit in units)
    peak = 0
    if shapes.on_host:
        projected = peak_bytes(
            lambda: projected_logits(
                shapes.model, units, _vectors(shapes, units, removed), _tokens(1, MERGE_PROBE).to(META)
            )
        )
        working = max(projected - vectors, _merging_peak(shapes, units, removed))
        peak = shapes.weight_bytes + _basis_bytes(units, precision_bytes) + vectors + working
    products, solvers = _merge_flops(units, removed)
    return Cost(
        flops=probe,
        head_flops=2 * MERGE_PROBE * shapes.logits(),
        flops64=products,
        solver_flops=2 * solvers,
        peak_bytes=peak,
        read_bytes=shapes.stored_bytes + _basis_bytes(units, precision_bytes) + vectors,
        written_bytes=(shapes.parameters - saved) * shapes.dtype.itemsize,
    )


def evaluate_cost(
    shapes: Shapes,
    units: Sequence[Unit],
    *,
    sequences: int,
    length: int,
    micro_batch: int,
    removed: Mapping[str, int] | None = None,
    checkpoint: bool = False,
    kl_sequences: int = 0,
    kl_length: int | None = None,
    precision_bytes: int = 8,
) -> Cost:
    """One forward pass with logits; of the dense model, of a merged ``checkpoint``, or of ``removed`` merged untrained.

    With ``kl_sequences``, the joint divergence too: a dense pass with its statistic and a truncated one. Neither the
    prompt's continuation nor lm-eval's tasks are counted.
    """
    removed = removed or {}
    tokens, probe = sequences * length, _probe(shapes)
    active = [unit for unit in units if removed.get(unit.name, 0) > 0]
    change = sum(_factor_products(u, u.dimension - removed[u.name]) - u.parameters for u in active)
    saved = sum(unit.saved(removed[unit.name]) for unit in active) * shapes.dtype.itemsize
    model, batch = shapes.model, _tokens(min(micro_batch, sequences), length)
    peak = shapes.weight_bytes - saved + peak_bytes(lambda: _logits_and_losses(shapes, batch))
    flops, heads, logits = tokens * (shapes.forward(length) + 2.0 * change), tokens * shapes.logits(), float(tokens)
    products = solvers = 0.0
    read = shapes.stored_bytes + TOKEN_BYTES * tokens
    if checkpoint:
        read += (shapes.parameters * shapes.dtype.itemsize - saved) - shapes.stored_bytes
    elif active:
        kept = _basis_bytes(units, precision_bytes)
        read += kept
        products, solvers = _merge_flops(units, removed)
        host = kept if shapes.on_host else 0
        peak = max(peak, shapes.weight_bytes + host + _merging_peak(shapes, units, removed))
    if kl_sequences:
        length = kl_length or length
        tokens, batch = kl_sequences * length, _tokens(min(micro_batch, kl_sequences), length)
        flops += tokens * 2 * shapes.forward(length) + probe.flops
        heads += tokens * (shapes.statistic() + shapes.logits()) + probe.head_flops
        products += sum(_projection_flops(unit, removed[unit.name]) for unit in active)
        logits += 2.0 * tokens
        read += TOKEN_BYTES * tokens

        def joint() -> None:
            bases = _empty_bases(units, precision_bytes)
            Sensitivity(model, units, bases, batch, micro_batch=micro_batch).joint(removed)

        kept = (kl_sequences - len(batch)) * length * _streamed_bytes(shapes)
        peak = max(peak, shapes.weight_bytes + peak_bytes(joint) + kept)
    return Cost(
        flops=flops,
        head_flops=heads,
        flops64=products,
        solver_flops=solvers,
        logits=logits * shapes.vocabulary,
        peak_bytes=peak,
        read_bytes=read,
        written_bytes=1024,
    )


@torch.inference_mode()
def _logits_and_losses(shapes: Shapes, batch: Tensor) -> None:
    """What the perplexity of a batch of windows takes: logits, their cross-entropy in float32, the check for NaN."""
    logits = shapes.model(input_ids=batch.to(META), use_cache=False).logits[:, :-1]
    labels = torch.empty(len(batch) * (batch.shape[1] - 1), dtype=torch.long, device=META)
    F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="none")
    torch.isfinite(logits)


def _training_peak(
    shapes: Shapes,
    units: Sequence[Unit],
    removed: Mapping[str, int],
    *,
    length: int,
    micro_batch: int,
    batch: int,
    modulated: bool,
    precision: torch.dtype,
    objective: Literal["kl", "task"],
    dropout: float,
    teacher_kept: bool,
) -> int:
    """Weights and the working tensors of a step in each form; two micro-batches, as gradients wait for the second."""
    model = shapes.model
    bases = {u.name: torch.empty(u.dimension, u.dimension, dtype=precision, device=META) for u in units}
    tokens = _tokens(min(batch, 2 * micro_batch), length)
    teacher = None
    if objective == "kl" and teacher_kept and shapes.linear_head:
        wide = torch.promote_types(shapes.dtype, torch.float32)
        m = torch.empty(*tokens.shape, shapes.hidden, dtype=wide, device=META)
        teacher = TeacherStatistic(m=m, c=m[..., 0], entropy=m[..., 0])
    settings = TrainingSettings(
        learning_rate=1e-3,
        objective=objective,
        epochs=2,
        batch_sequences=len(tokens),
        micro_batch=micro_batch,
        modulation_epochs=2.0 if modulated else 0.0,
        dropout=dropout,
    )

    def steps() -> None:
        with attached(model, units, bases, removed) as projectors, frozen(model), evaluating(model):
            trainer = Trainer(model, projectors, tokens, tokens, settings, teacher, None)
            for step in range(2):
                trainer.accumulate(step)
                trainer.update()

    started = (
        0
        if shapes.on_host
        else sum(
            u.dimension * (u.dimension - removed.get(u.name, 0)) * precision.itemsize
            for u in units
            if removed.get(u.name)
        )
    )  # the kept directions move to the device; on the CPU they are views of the bases
    return shapes.weight_bytes + started + peak_bytes(steps)


def _merging_peak(shapes: Shapes, units: Sequence[Unit], removed: Mapping[str, int]) -> int:
    """Working tensors of the most demanding unit's merge."""
    peak = 0
    for unit in _distinct(unit for unit in units if removed.get(unit.name, 0) > 0):
        model = copy.deepcopy(shapes.model)
        vectors = _vectors(shapes, [unit], removed)
        peak = max(peak, peak_bytes(lambda m=model, u=unit, v=vectors: merge_model(m, [u], v)))
    return peak


def _probe(shapes: Shapes) -> Cost:
    """The two passes over a few tokens that compare the head with the model's logits."""
    heads = 2 if shapes.linear_head else 1
    return Cost(flops=2 * PROBE * shapes.forward(PROBE), head_flops=heads * PROBE * shapes.logits())


def _factor_products(unit: Unit, rank: float) -> float:
    """Multiply-adds a token of a unit's factors; a factor that an output tie shares is applied by each member."""
    applied = len(unit.members) if unit.side == "output" else 1
    return rank * (applied * unit.dimension + sum(unit.others))


def _unread_inputs(unit: Unit) -> int:
    """Input widths of the first projected layers, whose input needs no gradient."""
    return unit.dimension if unit.side == "input" else sum(unit.others)


def _projection_flops(unit: Unit, count: int) -> float:
    """W P by way of the smaller of the two spaces."""
    return 4.0 * unit.parameters * min(count, unit.dimension - count)


def _orthogonal_flops(
    active: Sequence[Unit], removed: Mapping[str, int], steps: int, factored: int, validations: int
) -> tuple[float, float]:
    """Products and solves of qf(V), of the basis of its complement, and of the backward passes of both."""
    products = solvers = 0.0
    for unit in active:
        d, k = unit.dimension, removed[unit.name]
        r = d - k
        products += (steps + validations) * 4.0 * d * k**2 + steps * 4.0 * d * k**2
        solvers += (steps + validations) * (d * k**2 + k**3 / 3) + steps * d * k**2
        products += (factored + validations) * (4.0 * d * k * r + 4.0 * d * r**2) + factored * 4.0 * d * k * r
        solvers += (factored + validations) * (d * r**2 + r**3 / 3)
    return products, solvers


def _merge_flops(units: Sequence[Unit], removed: Mapping[str, int]) -> tuple[float, float]:
    products = solvers = 0.0
    for unit in units:
        d, k = unit.dimension, removed.get(unit.name, 0)
        if k == 0:
            continue
        products += 4.0 * d * k**2 + (4.0 * k + 4.0 * (d - k)) * unit.parameters
        solvers += d * k**2 + k**3 / 3 + 2.0 * d * k**2 - 2 / 3 * k**3 + 4.0 * d**2 * k - 4.0 * d * k**2 + 4 / 3 * k**3
    return products, solvers


def _distinct(units: Iterable[Unit]) -> list[Unit]:
    """Returns one unit of each shape."""
    return list({(u.side, u.dimension, u.others): u for u in reversed(list(units))}.values())[::-1]


def _basis_bytes(units: Iterable[Unit], precision_bytes: int) -> int:
    return sum(unit.dimension**2 for unit in units) * precision_bytes


def _vector_bytes(shapes: Shapes, units: Iterable[Unit], removed: Mapping[str, int]) -> int:
    return sum(unit.dimension * removed.get(unit.name, 0) for unit in units) * max(4, shapes.dtype.itemsize)


def _streamed_bytes(shapes: Shapes) -> int:
    """Bytes that measuring keeps of a token: a block's input, the teacher's statistic, the token."""
    return shapes.hidden * shapes.dtype.itemsize + shapes.statistic_bytes + 8


def _vectors(shapes: Shapes, units: Iterable[Unit], removed: Mapping[str, int]) -> dict[str, Tensor]:
    wide = torch.promote_types(shapes.dtype, torch.float32)
    chosen = {unit: removed.get(unit.name, 0) for unit in units}
    return {u.name: torch.empty(u.dimension, k, dtype=wide, device=META) for u, k in chosen.items() if k > 0}


def _empty_bases(units: Iterable[Unit], precision_bytes: int) -> dict[str, Tensor]:
    dtype = _precision(precision_bytes)
    return {unit.name: torch.empty(unit.dimension, unit.dimension, dtype=dtype, device=META) for unit in units}


def _tokens(sequences: int, length: int) -> Tensor:  # (B, T)
    return torch.zeros(sequences, length, dtype=torch.long)


def _precision(precision_bytes: int) -> torch.dtype:
    return torch.float64 if precision_bytes == 8 else torch.float32
