"""What each stage costs: FLOPs, peak memory and bytes, from shapes alone.

FLOPs are formulas: 2 a multiply-add of every matrix product, the decompositions by LAPACK's leading terms, attention
4 x context x width x blocks a token (not halved for causality); elementwise work, embeddings and rotary angles are not
counted. Memory comes from ``peaks``, which runs the stages dry, and what grows with the number of
sequences is added. ``micro_batch``, ``sequences`` and ``length`` are those of the tokens, ``precision_bytes`` of Grams
and bases.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from lsp_core.basis import Init
from lsp_core.flops import (
    backward_flops,
    factor_products,
    merge_flops,
    projection_flops,
)
from lsp_core.offload import rest_bytes
from lsp_core.peaks import (
    bases_peak,
    fisher_peak,
    gather_peak,
    joint_peak,
    measure_peak,
    merging_peak,
    perplexity_peak,
    projecting_peak,
    slots,
)
from lsp_core.sensitivity import counts_to_measure, removal_counts
from lsp_core.shapes import Cost, Shapes
from lsp_core.units import Unit

TOKEN_BYTES = 4  # a token id in the store
TOKEN_ID = 8  # in memory
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


def images_cost(shapes: Shapes, *, images: int) -> Cost:
    """Decodes ``images`` and writes them as bytes of pixels; what the encoded files weigh is not known."""
    size = images * shapes.examples(1, 1).numel()
    return Cost(peak_bytes=size, read_bytes=size, written_bytes=size)


def gather_cost(
    shapes: Shapes,
    units: Sequence[Unit],
    *,
    sequences: int,
    length: int,
    micro_batch: int,
    precision_bytes: int,
    offload: bool = False,
) -> Cost:
    """One forward pass without the head; a D x D product a token for each Gram, and member of an output tie.

    With ``offload`` the checks of the stream and the first block's second pass are not counted.
    """
    tokens = sequences * length
    grams = sum(2.0 * u.dimension**2 * (len(u.members) if u.side == "output" else 1) for u in units)
    batch = shapes.examples(min(micro_batch, sequences), length)
    working = gather_peak(shapes, units, batch, dtype_of(precision_bytes), offload=offload)
    if shapes.on_host:
        working += 8 * tokens
    if shapes.on_host and offload:  # all blocks' Grams, and what waits between them
        by_block = [[unit for unit in units if unit.block == block] for block in {unit.block for unit in units}]
        working += basis_bytes(units, precision_bytes) - max(basis_bytes(own, precision_bytes) for own in by_block)
        working += (sequences - len(batch)) * length * shapes.hidden * shapes.dtype.itemsize
    return Cost(
        flops=tokens * shapes.forward(length),
        flops64=tokens * grams,
        peak_bytes=held_bytes(shapes, offload) + working,
        read_bytes=shapes.stored_bytes + TOKEN_BYTES * tokens,
        written_bytes=basis_bytes(units, precision_bytes),
    )


def bases_cost(
    shapes: Shapes, units: Sequence[Unit], *, precision_bytes: int, init: Init = "whitened", offload: bool = False
) -> Cost:
    """An eigendecomposition a unit; for an input side also Cholesky, WbarT Wbar, ST(..)S, S V and its QR.

    A Gram that needs a ridge takes a few decompositions more, which are not counted. A random one is a QR, on the CPU.
    """
    products = solvers = 0.0
    for unit in units:
        cube = float(unit.dimension) ** 3
        if init == "random":  # Cholesky-QR, twice, and its check
            products, solvers = products + 6 * cube, solvers + 8 / 3 * cube
            continue
        solvers += EIGH * cube
        if unit.side == "input" and init == "whitened":
            products += 2.0 * unit.dimension * unit.parameters + 6 * cube
            solvers += (1 / 3 + 8 / 3) * cube
    if init == "random":
        working = max(unit.dimension**2 for unit in units) * (precision_bytes + (4 * 8 if shapes.on_host else 0))
    else:
        working = bases_peak(shapes, units, dtype_of(precision_bytes), init, offload=offload)
    kept = basis_bytes(units, precision_bytes)  # each is written as soon as it is there
    return Cost(
        flops64=products,
        solver_flops=solvers,
        peak_bytes=(0 if offload and not shapes.on_host else shapes.weight_bytes) + working,
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
    offload: bool = False,
) -> Cost:
    """The dense pass with its statistic, one pass over each block but the last to keep its input, and the candidates.

    A candidate in block b is a projected weight, the blocks b .. L-1 and the head. At each block one micro-batch checks
    that the dense model gives the same from there on.
    """
    tokens = sequences * length
    counts = {unit.name: counts_to_measure(unit, removal_counts(unit, points)) for unit in units}
    candidates = sum(len(counts[u.name]) for u in units)
    last = max(unit.block for unit in units)
    flops = shapes.forward(length) + (shapes.forward(length) - shapes.forward(length, last))
    flops += sum(len(counts[u.name]) * shapes.forward(length, u.block) for u in units)
    heads = shapes.statistic() + candidates * shapes.logits()
    probe = probe_cost(shapes)
    batch = shapes.examples(min(micro_batch, sequences), length)
    checked = {unit.block for unit in units} - {0}
    probe_flops = probe.flops + len(batch) * length * sum(shapes.forward(length, block) for block in checked)
    checked_heads = 0.0 if shapes.linear_head else len(batch) * length * len(checked) * shapes.logits()
    working = measure_peak(shapes, units, batch, dtype_of(precision_bytes), offload=offload)
    kept = (sequences - len(batch)) * length * waiting_bytes(shapes, offload)
    return Cost(
        flops=tokens * flops + probe_flops,
        head_flops=tokens * heads + probe.head_flops + checked_heads,
        flops64=sum(projection_flops(u, k) for u in units for k in counts[u.name]),
        logits=tokens * (1 + candidates) * float(shapes.vocabulary),
        peak_bytes=held_bytes(shapes, offload) + working + kept,
        read_bytes=shapes.stored_bytes + basis_bytes(units, precision_bytes) + TOKEN_BYTES * tokens,
        written_bytes=len(units) * (points - 1) * (8 + 1 + 8),
    )


def fisher_cost(
    shapes: Shapes,
    units: Sequence[Unit],
    *,
    points: int,
    sequences: int,
    length: int,
    precision_bytes: int,
) -> Cost:
    """A forward and a backward pass of every sequence with the weights' gradients, and the candidates' weights.

    Nobody needs the gradient of the first unit's input.
    """
    tokens = sequences * length
    gradient = shapes.forward(length) + backward_flops(shapes, length, 0)
    gradient += 2.0 * sum(unit.parameters for unit in units[1:])
    counts = {unit.name: counts_to_measure(unit, removal_counts(unit, points)) for unit in units}
    probe = probe_cost(shapes)
    return Cost(
        flops=tokens * gradient + probe.flops,
        gradient_flops=tokens * gradient,
        head_flops=tokens * 2 * shapes.logits() + probe.head_flops,
        flops64=sum(projection_flops(u, k) for u in units for k in counts[u.name]),
        logits=float(tokens) * shapes.vocabulary,
        peak_bytes=shapes.weight_bytes
        + fisher_peak(shapes, units, shapes.examples(1, length), dtype_of(precision_bytes)),
        read_bytes=shapes.stored_bytes + basis_bytes(units, precision_bytes) + TOKEN_BYTES * tokens,
        written_bytes=len(units) * (points - 1) * (8 + 1 + 8),
    )


def joint_cost(
    shapes: Shapes,
    units: Sequence[Unit],
    removed: Mapping[str, int],
    *,
    measurements: int,
    sequences: int,
    length: int,
    micro_batch: int,
    precision_bytes: int,
    offload: bool = False,
) -> Cost:
    """A dense pass with its statistic, and ``measurements`` passes of the model cut as ``removed`` or near it."""
    tokens = sequences * length
    probe = probe_cost(shapes)
    batch = shapes.examples(min(micro_batch, sequences), length)
    working = joint_peak(shapes, units, removed, batch, dtype_of(precision_bytes), offload=offload)
    return Cost(
        flops=tokens * (1 + measurements) * shapes.forward(length) + probe.flops,
        head_flops=tokens * (shapes.statistic() + measurements * shapes.logits()) + probe.head_flops,
        flops64=measurements * sum(projection_flops(unit, removed.get(unit.name, 0)) for unit in units),
        logits=tokens * (1 + measurements) * float(shapes.vocabulary),
        peak_bytes=held_bytes(shapes, offload)
        + working
        + (sequences - len(batch)) * length * waiting_bytes(shapes, offload),
        read_bytes=shapes.stored_bytes + basis_bytes(units, precision_bytes) + TOKEN_BYTES * tokens,
        written_bytes=64 * len(units),
    )


def allocate_cost(units: Sequence[Unit], *, points: int) -> Cost:
    """Next to nothing: the grid is read, one count a unit written."""
    return Cost(read_bytes=len(units) * (points - 1) * (8 + 1 + 8), written_bytes=64 * len(units))


def select_cost(shapes: Shapes, units: Sequence[Unit], removed: Mapping[str, int]) -> Cost:
    """Copies the V's of one training; the other trainings' histories are small."""
    vectors = vector_bytes(shapes, units, removed)
    return Cost(read_bytes=vectors, written_bytes=vectors)


def merge_cost(shapes: Shapes, units: Sequence[Unit], removed: Mapping[str, int], *, precision_bytes: int) -> Cost:
    """Two complete QRs, U_perpT W, U UT W and the check a unit, in float64, and two short forward passes.

    On the CPU whatever the device, whose peak is 0 then.
    """
    probe = MERGE_PROBE * shapes.forward(MERGE_PROBE) * 2
    vectors = vector_bytes(shapes, units, removed)
    saved = sum(unit.saved(removed.get(unit.name, 0)) for unit in units)
    peak = 0
    if shapes.on_host:
        projected = projecting_peak(shapes, units, removed, shapes.examples(1, MERGE_PROBE))
        working = max(projected, merging_peak(shapes, units, removed))
        peak = shapes.weight_bytes + vectors + working
    products, solvers = merge_flops(units, removed)
    return Cost(
        flops=probe,
        head_flops=2 * MERGE_PROBE * shapes.logits(),
        flops64=products,
        solver_flops=2 * solvers,
        peak_bytes=peak,
        read_bytes=shapes.stored_bytes + basis_bytes(units, precision_bytes) + vectors,
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
    offload: bool = False,
) -> Cost:
    """One forward pass with logits; of the dense model, of a merged ``checkpoint``, or of ``removed`` merged untrained.

    With ``kl_sequences``, the joint divergence too: a dense pass with its statistic and a truncated one. Neither the
    prompt's continuation nor lm-eval's tasks are counted.
    """
    removed = removed or {}
    tokens, probe = sequences * length, probe_cost(shapes)
    active = [unit for unit in units if removed.get(unit.name, 0) > 0]
    change = sum(factor_products(u, u.dimension - removed[u.name]) - u.parameters for u in active)
    saved = sum(unit.saved(removed[unit.name]) for unit in active) * shapes.dtype.itemsize
    batch = shapes.examples(min(micro_batch, sequences), length)
    held = held_bytes(shapes, offload) + (slots(shapes, active, removed) if offload else 0)
    peak = held - (0 if offload and not shapes.on_host else saved) + perplexity_peak(shapes, batch)
    flops, heads, logits = tokens * (shapes.forward(length) + 2.0 * change), tokens * shapes.logits(), float(tokens)
    products = solvers = 0.0
    read = shapes.stored_bytes + TOKEN_BYTES * tokens
    if checkpoint:
        read += (shapes.parameters * shapes.dtype.itemsize - saved) - shapes.stored_bytes
    elif active:
        kept = basis_bytes(units, precision_bytes)
        read += kept
        products, solvers = merge_flops(units, removed)
        host = kept if shapes.on_host else 0
        if shapes.on_host or not offload:  # else on the CPU
            peak = max(peak, shapes.weight_bytes + host + merging_peak(shapes, units, removed))
    if kl_sequences:
        length = kl_length or length
        tokens, batch = kl_sequences * length, shapes.examples(min(micro_batch, kl_sequences), length)
        flops += tokens * 2 * shapes.forward(length) + probe.flops
        heads += tokens * (shapes.statistic() + shapes.logits()) + probe.head_flops
        products += sum(projection_flops(unit, removed[unit.name]) for unit in active)
        logits += 2.0 * tokens
        read += TOKEN_BYTES * tokens
        working = joint_peak(shapes, units, removed, batch, dtype_of(precision_bytes), offload=offload)
        kept = (kl_sequences - len(batch)) * length * waiting_bytes(shapes, offload)
        peak = max(peak, held_bytes(shapes, offload) + working + kept)
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


def probe_cost(shapes: Shapes) -> Cost:
    """The two passes over a few tokens that compare the head with the model's logits."""
    heads = 2 if shapes.linear_head else 1
    return Cost(flops=2 * PROBE * shapes.forward(PROBE), head_flops=heads * PROBE * shapes.logits())


def basis_bytes(units: Iterable[Unit], precision_bytes: int) -> int:
    return sum(unit.dimension**2 for unit in units) * precision_bytes


def vector_bytes(shapes: Shapes, units: Iterable[Unit], removed: Mapping[str, int]) -> int:
    return sum(unit.dimension * removed.get(unit.name, 0) for unit in units) * max(4, shapes.dtype.itemsize)


def held_bytes(shapes: Shapes, offload: bool) -> int:
    """Bytes of the weights that are on the device throughout: with ``offload``, off the CPU, all but the blocks'."""
    return rest_bytes(shapes.model) if offload and not shapes.on_host else shapes.weight_bytes


def waiting_bytes(shapes: Shapes, offload: bool) -> int:
    """Bytes that measuring keeps of a token: a block's input, the teacher's statistic, the token.

    With ``offload``, off the CPU, the token alone.
    """
    kept = 0 if offload and not shapes.on_host else shapes.hidden * shapes.dtype.itemsize + shapes.statistic_bytes
    return kept + TOKEN_ID


def dtype_of(precision_bytes: int) -> torch.dtype:
    return torch.float64 if precision_bytes == 8 else torch.float32
