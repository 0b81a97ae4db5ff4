"""x - ((x U) o s_m) UT for each row s_m of some scales, and its backward pass.

Two matrix products, each with the elementwise part in its epilogue:

    scaled products      (x U) o s_m for each m, or the sum over m of (x_m U) o s_m
    subtracted product   the sum over m of x_m, minus p UT

The map is symmetric, so its backward pass is the same two with other operands. K is padded with zeros to a multiple of
``ALIGNMENT``, which changes nothing, and lets matrix units load whole rows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MAX_MEMBERS = 4
ALIGNMENT = 16  # elements
GROUP = 8  # rows of tiles that run together, so that they find U in the cache


@triton.jit
def _tile(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Returns the row and the column of this program's tile: down GROUP rows, then to the next column."""
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    band = program // (GROUP * across)
    height = min(down - band * GROUP, GROUP)
    inside = program % (GROUP * across)
    return band * GROUP + inside % height, inside // height


@triton.jit
def _product(
    x, u, row, column, rows, columns, inner, x_row, u_inner, u_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns the tile x[row] @ u[:, column] in float32."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    u_columns = u + column[None, :] * u_column
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(x_rows + k[None, :], mask=(row < rows)[:, None] & (k < inner)[None, :], other=0.0)
        inside = (k < inner)[:, None] & (column < columns)[None, :]
        right = tl.load(u_columns + k.to(tl.int64)[:, None] * u_inner, mask=inside, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def _scaled_product_kernel(
    x0, x1, x2, x3,  # (T, D), rows x_row apart; those after the first are read if SUM
    u,  # (D, K), contiguous
    scales,  # (MEMBERS, K), contiguous
    out,  # (T, K) if SUM else (MEMBERS, T, K), contiguous
    T, D, K, stride0, stride1, stride2, stride3,
    MEMBERS: tl.constexpr, SUM: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_row, tile_column = _tile(T, K, BLOCK_M, BLOCK_N, GROUP)
    row = tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < T)[:, None] & (column < K)[None, :]
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    total = _product(x0, u, row, column, T, K, D, stride0, K, 1, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if SUM:
        total = total * tl.load(scales + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        if MEMBERS > 1:
            more = _product(x1, u, row, column, T, K, D, stride1, K, 1, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
            total += more * tl.load(scales + K + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        if MEMBERS > 2:
            more = _product(x2, u, row, column, T, K, D, stride2, K, 1, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
            total += more * tl.load(scales + 2 * K + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        if MEMBERS > 3:
            more = _product(x3, u, row, column, T, K, D, stride3, K, 1, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
            total += more * tl.load(scales + 3 * K + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
    else:
        for member in tl.static_range(MEMBERS):
            scale = tl.load(scales + member * K + column, mask=column < K, other=0.0).to(tl.float32)
            own = out + member * tl.cast(T, tl.int64) * K
            tl.store(own + place, (total * scale[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _subtracted_product_kernel(
    x0, x1, x2, x3,  # (T, D), rows stride0 ... apart
    p,  # (T, K), rows p_row apart
    u,  # (D, K), contiguous
    out,  # (T, D), contiguous
    T, D, K, stride0, stride1, stride2, stride3, p_row,
    MEMBERS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_row, tile_column = _tile(T, D, BLOCK_M, BLOCK_N, GROUP)
    row = tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < T)[:, None] & (column < D)[None, :]
    row64 = row.to(tl.int64)[:, None]
    removed = _product(p, u, row, column, T, D, K, p_row, 1, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    total = tl.load(x0 + row64 * stride0 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if MEMBERS > 1:
        total += tl.load(x1 + row64 * stride1 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if MEMBERS > 2:
        total += tl.load(x2 + row64 * stride2 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if MEMBERS > 3:
        total += tl.load(x3 + row64 * stride3 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row64 * D + column[None, :], (total - removed).to(out.dtype.element_ty), mask=inside)


def project(x: Tensor, u: Tensor, scales: Tensor) -> list[Tensor]:
    """Returns x - ((x U) o s_m) UT for each row of ``scales``, and last (x U) o s_m, which the backward pass needs.

    ``x`` (..., D), ``u`` (D, K), ``scales`` (M, K) -> M times (..., D), and (M, T, K padded).
    """
    flat = x.reshape(-1, len(u))
    u, scales = _aligned(u), _aligned(scales)
    narrow = scaled_products(flat, u, scales)
    return [*(subtracted_product([flat], one, u).view(x.shape) for one in narrow), narrow]


def project_backward(
    grads: Sequence[Tensor], x: Tensor, u: Tensor, scales: Tensor, narrow: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``x`` and ``u`` from those of the M results and ``narrow``, the last of ``project``.

    With g = sum over m of (dy_m U) o s_m: dx = sum over m of dy_m - g UT, dU = -(xT g + sum over m of dy_mT narrow_m).
    """
    flat, width = x.reshape(-1, len(u)), u.shape[1]
    each = [grad.reshape(-1, len(u)) for grad in grads]
    u, scales = _aligned(u), _aligned(scales)
    inner = summed_scaled_product(each, u, scales)
    x_grad = subtracted_product(each, inner, u).view(x.shape)
    u_grad = flat.T @ inner
    for number, (grad, one) in enumerate(zip(each, narrow, strict=True)):
        u_grad.addmm_(grad.T, one, beta=1 if number else -1, alpha=-1)
    return x_grad, u_grad if u.shape[1] == width else u_grad[:, :width].contiguous()


def scaled_products(x: Tensor, u: Tensor, scales: Tensor) -> Tensor:
    """Returns (x U) o s_m for each row s_m of ``scales``: (T, D), (D, K), (M, K) -> (M, T, K), from one product."""
    out = x.new_empty(len(scales), len(x), u.shape[1])
    _launch_scaled([_rows(x)], u, scales, out, together=False)
    return out


def summed_scaled_product(xs: Sequence[Tensor], u: Tensor, scales: Tensor) -> Tensor:
    """Returns the sum over m of (x_m U) o s_m: M times (T, D), (D, K), (M, K) -> (T, K)."""
    assert len(xs) == len(scales), (len(xs), len(scales))
    out = xs[0].new_empty(len(xs[0]), u.shape[1])
    _launch_scaled([_rows(x) for x in xs], u, scales, out, together=True)
    return out


def subtracted_product(xs: Sequence[Tensor], p: Tensor, u: Tensor) -> Tensor:
    """Returns the sum of ``xs``, each (T, D), minus ``p`` UT: (T, K), (D, K) -> (T, D)."""
    members = len(xs)
    assert members <= MAX_MEMBERS, members
    xs, p = [_rows(x) for x in xs], _rows(p)
    xs = xs + [xs[0]] * (MAX_MEMBERS - members)
    rows, columns = xs[0].shape
    out = xs[0].new_empty(rows, columns)
    tile = _tiles(xs[0].dtype)
    _subtracted_product_kernel[(_count(rows, columns, tile),)](
        *xs,
        p,
        u.contiguous(),
        out,
        rows,
        columns,
        p.shape[1],
        *(x.stride(0) for x in xs),
        p.stride(0),
        MEMBERS=members,
        **tile,
    )
    return out


def _launch_scaled(xs: list[Tensor], u: Tensor, scales: Tensor, out: Tensor, *, together: bool) -> None:
    (rows, inner), (members, columns) = xs[0].shape, scales.shape
    assert members <= MAX_MEMBERS, members
    xs = xs + [xs[0]] * (MAX_MEMBERS - len(xs))
    tile = _tiles(xs[0].dtype)
    _scaled_product_kernel[(_count(rows, columns, tile),)](
        *xs,
        u.contiguous(),
        scales.contiguous(),
        out,
        rows,
        inner,
        columns,
        *(x.stride(0) for x in xs),
        MEMBERS=members,
        SUM=together,
        **tile,
    )


def _tiles(dtype: torch.dtype) -> dict[str, int | str]:
    sizes: dict[str, int | str] = {"GROUP": GROUP, "num_stages": 3, "num_warps": 8}
    if dtype == torch.float32:
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return sizes | {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "PRECISION": "tf32" if tf32 else "ieee"}
    return sizes | {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "PRECISION": "ieee"}


def _count(rows: int, columns: int, tile: dict[str, int | str]) -> int:
    return triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"])


def _rows(matrix: Tensor) -> Tensor:
    """Returns ``matrix`` with the elements of a row side by side; copied only where they are not."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _aligned(matrix: Tensor) -> Tensor:
    """Returns ``matrix`` with columns of zeros up to a multiple of ``ALIGNMENT``."""
    return F.pad(matrix, (0, -matrix.shape[1] % ALIGNMENT))
