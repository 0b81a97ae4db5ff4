"""y_m = B_m (A x) + b_m of a few tokens, for every member m of a tied group, in two launches.

1. z = A x. A program holds some rows of A and one slice of D_in; the slices' sums stay apart (float32), so that narrow
   factors too occupy the whole device and the order of summation never changes.
2. y_m = B_m z + b_m: the programs of all members run side by side, each adds the slices of z as it reads them.

Both are bound by the bytes of A and B, which are read once. One token is multiplied elementwise, more go to the matrix
units. Rows that start at multiples of 16 elements are read fastest: a rank that is a multiple of 16 is worth having.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 16
MAX_MEMBERS = 4
PROGRAMS = 1024  # about eight for each multiprocessor of a large device: enough loads in flight for its bandwidth


@triton.jit
def _latent_kernel(
    x,  # (TOKENS, D), rows stride_x apart
    a,  # (R, D), rows stride_a apart
    z,  # (slices, TOKENS, R) float32
    D,
    R,
    stride_x,
    stride_a,
    length,  # of a slice of D, a multiple of BLOCK_D
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MATRIX: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1)
    token = tl.arange(0, PADDED)
    a_row = a + row.to(tl.int64)[:, None] * stride_a
    x_row = x + token.to(tl.int64)[None, :] * stride_x
    total = tl.zeros((BLOCK_R, PADDED if MATRIX else BLOCK_D), tl.float32)
    for step in range(0, length, BLOCK_D):
        column = part * length + step + tl.arange(0, BLOCK_D)
        weights = tl.load(a_row + column[None, :], mask=(row < R)[:, None] & (column < D)[None, :], other=0.0)
        if MATRIX:
            inside = (column < D)[:, None] & (token < TOKENS)[None, :]
            values = tl.load(x_row + column[:, None], mask=inside, other=0.0)
            total = tl.dot(weights, values, total, input_precision="ieee")
        else:
            values = tl.load(x + column, mask=column < D, other=0.0)
            total += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    if MATRIX:
        out = z + (part * TOKENS + token)[None, :] * R + row[:, None]
        tl.store(out, total, mask=(row < R)[:, None] & (token < TOKENS)[None, :])
    else:
        tl.store(z + part * R + row, tl.sum(total, 1), mask=row < R)


@triton.jit
def _expand_rows(
    block,
    z,  # (SLICES, TOKENS, R) float32
    b,  # (D, R), rows stride_b apart
    bias,  # (D,), read if BIASED
    y,  # (TOKENS, D)
    D,
    R,
    stride_b,
    BIASED: tl.constexpr,
    SLICES: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MATRIX: tl.constexpr,
):
    row = block * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.arange(0, PADDED)
    b_row = b + row.to(tl.int64)[:, None] * stride_b
    total = tl.zeros((BLOCK_D, PADDED if MATRIX else BLOCK_R), tl.float32)
    for start in range(0, R, BLOCK_R):
        column = start + tl.arange(0, BLOCK_R)
        weights = tl.load(b_row + column[None, :], mask=(row < D)[:, None] & (column < R)[None, :], other=0.0)
        if MATRIX:
            latent = tl.zeros((BLOCK_R, PADDED), tl.float32)
            inside = (column < R)[:, None] & (token < TOKENS)[None, :]
            for part in tl.static_range(SLICES):
                latent += tl.load(z + (part * TOKENS + token)[None, :] * R + column[:, None], mask=inside, other=0.0)
            total = tl.dot(weights, latent.to(weights.dtype), total, input_precision="ieee")
        else:
            latent = tl.zeros((BLOCK_R,), tl.float32)
            for part in tl.static_range(SLICES):
                latent += tl.load(z + part * R + column, mask=column < R, other=0.0)
            total += weights.to(tl.float32) * latent[None, :]
    if MATRIX:
        if BIASED:
            total += tl.load(bias + row, mask=row < D, other=0.0).to(tl.float32)[:, None]
        inside = (row < D)[:, None] & (token < TOKENS)[None, :]
        tl.store(y + token[None, :] * D + row[:, None], total.to(y.dtype.element_ty), mask=inside)
    else:
        result = tl.sum(total, 1)
        if BIASED:
            result += tl.load(bias + row, mask=row < D, other=0.0).to(tl.float32)
        tl.store(y + row, result.to(y.dtype.element_ty), mask=row < D)


@triton.jit
def _expand_kernel(
    z, b0, b1, b2, b3, bias0, bias1, bias2, bias3, y0, y1, y2, y3,
    D0, D1, D2, D3, stride0, stride1, stride2, stride3, R,
    MEMBERS: tl.constexpr, BIASED: tl.constexpr, SLICES: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    blocks = tl.cdiv(D0, BLOCK_D)
    if block < blocks:
        _expand_rows(
            block, z, b0, bias0, y0, D0, R, stride0, BIASED & 1,
            SLICES, TOKENS, PADDED, BLOCK_D, BLOCK_R, MATRIX,
        )  # fmt: skip
    if MEMBERS > 1:
        block -= blocks
        blocks = tl.cdiv(D1, BLOCK_D)
        if (block >= 0) & (block < blocks):
            _expand_rows(
                block, z, b1, bias1, y1, D1, R, stride1, BIASED & 2,
                SLICES, TOKENS, PADDED, BLOCK_D, BLOCK_R, MATRIX,
            )  # fmt: skip
    if MEMBERS > 2:
        block -= blocks
        blocks = tl.cdiv(D2, BLOCK_D)
        if (block >= 0) & (block < blocks):
            _expand_rows(
                block, z, b2, bias2, y2, D2, R, stride2, BIASED & 4,
                SLICES, TOKENS, PADDED, BLOCK_D, BLOCK_R, MATRIX,
            )  # fmt: skip
    if MEMBERS > 3:
        block -= blocks
        blocks = tl.cdiv(D3, BLOCK_D)
        if (block >= 0) & (block < blocks):
            _expand_rows(
                block, z, b3, bias3, y3, D3, R, stride3, BIASED & 8,
                SLICES, TOKENS, PADDED, BLOCK_D, BLOCK_R, MATRIX,
            )  # fmt: skip


def low_rank_linear(x: Tensor, a: Tensor, bs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns B_m A x + b_m for each member: (..., D_in), (R, D_in), (D_out_m, R), (D_out_m,) -> (..., D_out_m).

    At most ``MAX_TOKENS`` tokens and ``MAX_MEMBERS`` members, all of one dtype: float32, bfloat16 or float16.
    """
    shape, x = x.shape[:-1], _rows(x.reshape(-1, x.shape[-1]))
    a, bs = _rows(a), [_rows(b) for b in bs]
    tokens, width = x.shape
    rank, members = len(a), len(bs)
    assert 1 <= tokens <= MAX_TOKENS, tokens
    assert 1 <= members <= MAX_MEMBERS, members
    matrix = tokens > 1
    sizes = {"TOKENS": tokens, "PADDED": MAX_TOKENS if matrix else 1, "MATRIX": matrix}

    block_r, block_d = (16, 256) if matrix else (4, 1024)
    row_blocks = triton.cdiv(rank, block_r)
    slices = max(1, min(2 if matrix else 4, PROGRAMS // row_blocks, width // block_d))
    length = triton.cdiv(triton.cdiv(width, slices), block_d) * block_d
    slices = triton.cdiv(width, length)
    z = torch.empty(slices, tokens, rank, dtype=torch.float32, device=x.device)
    _latent_kernel[(row_blocks, slices)](
        x, a, z, width, rank, x.stride(0), a.stride(0), length, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4, **sizes
    )

    if matrix:
        block_d, block_r = 64, 32 if x.dtype == torch.float32 else 128
    else:  # few rows: fewer of them to a program
        block_d, block_r = (16, 256) if sum(map(len, bs)) >= 8 * PROGRAMS else (8, 512)
    ys = [x.new_empty(tokens, len(b)) for b in bs]
    blocks = sum(triton.cdiv(len(b), block_d) for b in bs)
    spare = range(MAX_MEMBERS - members)  # arguments that no program reads
    biased = sum(1 << member for member, bias in enumerate(biases) if bias is not None)
    _expand_kernel[(blocks,)](
        z,
        *bs,
        *(bs[0] for _ in spare),
        *(bs[0] if bias is None else bias.contiguous() for bias in biases),
        *(bs[0] for _ in spare),
        *ys,
        *(ys[0] for _ in spare),
        *(len(b) for b in bs),
        *(len(bs[0]) for _ in spare),
        *(b.stride(0) for b in bs),
        *(bs[0].stride(0) for _ in spare),
        rank,
        MEMBERS=members,
        BIASED=biased,
        SLICES=slices,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        num_warps=4,
        **sizes,
    )
    return [y.view(*shape, -1) for y in ys]


def _rows(matrix: Tensor) -> Tensor:
    """Returns ``matrix`` with the elements of a row side by side; copied only where they are not."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()
