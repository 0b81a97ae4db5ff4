"""softmax(scores) times a latent, for all heads of a sequence at once, split over the context.

The heads share the latent, so a program takes all of them (up to 64) against BLOCK_R columns of it and one slice of the
context: the latent is read once, whatever the number of heads. It keeps the running maximum and sum of its slice beside
the accumulator, all float32; a second launch brings the slices together. Positions with a score of -inf weigh nothing,
and where ``keep`` says so their latent is not read at all. A head all of whose scores are -inf gets zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # two for each multiprocessor of a large device
MIN_SLICE = 256  # positions; shorter ones would write as many bytes as they read
MAX_SLICES = 64
MAX_ROWS = 65535  # sequences times heads, each a block of a grid's second or third dimension


@triton.jit
def _aggregate_kernel(
    scores,  # (B, H, T) float32
    values,  # (B, T, R), strides values_b, values_t, 1
    keep,  # (B, T), strides keep_b, 1; read if HAS_KEEP
    tops,  # (B, slices, H) float32
    totals,  # likewise
    partials,  # (B, slices, H, R) float32
    T,
    R,
    heads,
    values_b,
    values_t,
    keep_b,
    length,  # of a slice, a multiple of BLOCK_T
    HAS_KEEP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1)
    blocks = tl.cdiv(heads, BLOCK_H)
    batch = (tl.program_id(2) // blocks).to(tl.int64)
    head = (tl.program_id(2) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    result = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    for step in range(0, length, BLOCK_T):
        t = part * length + step + tl.arange(0, BLOCK_T)
        kept = t < T
        inside = (head < heads)[:, None] & kept[None, :]
        score = tl.load(scores + (batch * heads + head)[:, None] * T + t[None, :], mask=inside, other=float("-inf"))
        if HAS_KEEP:
            kept = kept & (tl.load(keep + batch * keep_b + t, mask=kept, other=0) != 0)
        value_row = values + batch * values_b + t.to(tl.int64)[:, None] * values_t
        value = tl.load(value_row + r[None, :], mask=kept[:, None] & (r < R)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(score, 1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # no NaN from -inf - -inf
        rescale = tl.exp(top - origin)
        mass = tl.exp(score - origin[:, None])
        total = total * rescale + tl.sum(mass, 1)
        result = tl.dot(mass.to(value.dtype), value, result * rescale[:, None], input_precision="ieee")
        top = new_top
    row = (batch * tl.num_programs(1) + part) * heads + head
    tl.store(partials + row[:, None] * R + r[None, :], result, mask=(head < heads)[:, None] & (r < R)[None, :])
    if tl.program_id(0) == 0:
        tl.store(tops + row, top, mask=head < heads)
        tl.store(totals + row, total, mask=head < heads)


@triton.jit
def _combine_kernel(
    tops,  # (B, slices, H) float32
    totals,  # likewise
    partials,  # (B, slices, H, R) float32
    out,  # (B, H, R)
    R,
    heads,
    slices,
    PADDED: tl.constexpr,  # slices, as a power of 2
    BLOCK_R: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    part = tl.arange(0, PADDED)
    row = (batch * slices + part) * heads + head
    top = tl.load(tops + row, mask=part < slices, other=float("-inf"))
    highest = tl.max(top, 0)
    weight = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight * tl.load(totals + row, mask=part < slices, other=0.0), 0)
    inside = (part < slices)[:, None] & (r < R)[None, :]
    partial = tl.load(partials + row[:, None] * R + r[None, :], mask=inside, other=0.0)
    result = tl.sum(weight[:, None] * partial, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (batch * heads + head) * R + r, result.to(out.dtype.element_ty), mask=r < R)


def aggregate(scores: Tensor, values: Tensor, keep: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns softmax(scores) @ values in ``dtype``: (B, H, T) float32, (B, T, R), (B, T) bool | None -> (B, H, R).

    No dimension is 0; B H is at most ``MAX_ROWS``.
    """
    values = values if values.stride(-1) == 1 else values.contiguous()
    keep = keep if keep is None or keep.stride(-1) == 1 else keep.contiguous()
    batch, heads, context = scores.shape
    assert batch * heads <= MAX_ROWS, (batch, heads)
    rank = values.shape[-1]
    device = values.device
    block_h, block_t, block_r = max(16, min(64, triton.next_power_of_2(heads))), 64, 128
    blocks = triton.cdiv(rank, block_r)
    head_blocks = triton.cdiv(heads, block_h)
    wanted = triton.cdiv(PROGRAMS, blocks * batch * head_blocks)
    slices = max(1, min(wanted, MAX_SLICES, context // MIN_SLICE))
    length = triton.cdiv(triton.cdiv(context, slices), block_t) * block_t
    slices = triton.cdiv(context, length)
    tops, totals = torch.empty(2, batch, slices, heads, dtype=torch.float32, device=device)
    partials = torch.empty(batch, slices, heads, rank, dtype=torch.float32, device=device)
    _aggregate_kernel[(blocks, slices, batch * head_blocks)](
        scores,
        values,
        scores if keep is None else keep,
        tops,
        totals,
        partials,
        context,
        rank,
        heads,
        *values.stride()[:2],
        0 if keep is None else keep.stride(0),
        length,
        HAS_KEEP=keep is not None,
        BLOCK_H=block_h,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        num_warps=4,
    )
    out = torch.empty(batch, heads, rank, dtype=dtype, device=device)
    _combine_kernel[(blocks, batch * heads)](
        tops, totals, partials, out, rank, heads, slices, PADDED=triton.next_power_of_2(slices), BLOCK_R=block_r
    )
    return out
