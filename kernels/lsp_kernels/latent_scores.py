"""Attention scores of one query position: against keys rebuilt from a latent, and against keys that are stored.

score[b, h, t] = scale * q[b, h] . rotate_t(norm(B_h z[b, t] + bias_h)), in float32; -inf where ``keep`` is false.

The rebuilt key never leaves the program: a program rebuilds BLOCK_T keys of one key/value head on the matrix units, in
three column ranges, since rotation pairs column i of the first half of the rotated ones with column i of the second:

    low  = [0, HALF)         k_low cos - k_high sin
    high = [HALF, 2 HALF)    k_high cos + k_low sin
    rest = [2 HALF, HEAD)    as it is
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HEAD = 256


@triton.jit
def _columns(ptr, row, row_stride, column, kept, count):
    """Loads ptr[row, column] as float32; 0 outside."""
    inside = kept[:, None] & (column < count)[None, :]
    return tl.load(ptr + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _vector(ptr, column, count):
    """Loads ptr[column] as float32; 0 outside."""
    return tl.load(ptr + column, mask=column < count, other=0.0).to(tl.float32)


@triton.jit
def _rebuilt_scores_kernel(
    query,  # (B, H, HEAD)
    latent,  # (B, T, R), strides latent_b, latent_t, 1
    factor,  # (H_kv, HEAD, R)
    bias,  # (H_kv * HEAD,), read if HAS_BIAS
    norm,  # (HEAD,), read if HAS_NORM
    cos,  # (B, T, 2 HALF), strides cos_b, cos_t, 1; read if HALF
    sin,  # likewise
    keep,  # (B, T), strides keep_b, 1; read if HAS_KEEP
    scores,  # (B, H, T) float32
    T,
    R,
    heads,  # H_kv
    latent_b,
    latent_t,
    cos_b,
    cos_t,
    sin_b,
    sin_t,
    keep_b,
    group,  # H / H_kv
    scale,
    eps,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    head = tl.program_id(0) % heads  # neighbours in time share the latent, not the factor
    batch = tl.program_id(1).to(tl.int64)
    t = (tl.program_id(0) // heads) * BLOCK_T + tl.arange(0, BLOCK_T)
    kept = t < T
    if HAS_KEEP:
        kept = kept & (tl.load(keep + batch * keep_b + t, mask=kept, other=0) != 0)
    first = batch * heads * group + head * group  # the group's first query head
    if tl.max(kept.to(tl.int32), 0) == 0:
        for member in range(group):
            nothing = tl.full((BLOCK_T,), float("-inf"), tl.float32)
            tl.store(scores + (first + member) * T + t, nothing, mask=t < T)
    else:
        i = tl.arange(0, HALF_PADDED)
        j = tl.arange(0, REST_PADDED)
        t64 = t.to(tl.int64)
        low = tl.zeros((BLOCK_T, HALF_PADDED), tl.float32)
        high = tl.zeros((BLOCK_T, HALF_PADDED), tl.float32)
        rest = tl.zeros((BLOCK_T, REST_PADDED), tl.float32)
        z_row = latent + batch * latent_b + t64[:, None] * latent_t
        own = factor + head.to(tl.int64) * HEAD * R
        for start in range(0, R, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            z = tl.load(z_row + r[None, :], mask=kept[:, None] & (r < R)[None, :], other=0.0)
            if HALF:
                inside = (r < R)[:, None] & (i < HALF)[None, :]
                low_factor = tl.load(own + i[None, :] * R + r[:, None], mask=inside, other=0.0)
                low = tl.dot(z, low_factor, low, input_precision="ieee")
                high_factor = tl.load(own + (HALF + i)[None, :] * R + r[:, None], mask=inside, other=0.0)
                high = tl.dot(z, high_factor, high, input_precision="ieee")
            if REST:
                inside = (r < R)[:, None] & (j < REST)[None, :]
                rest_factor = tl.load(own + (2 * HALF + j)[None, :] * R + r[:, None], mask=inside, other=0.0)
                rest = tl.dot(z, rest_factor, rest, input_precision="ieee")
        if HAS_BIAS:
            low += _vector(bias + head * HEAD, i, HALF)[None, :]
            high += _vector(bias + head * HEAD + HALF, i, HALF)[None, :]
            rest += _vector(bias + head * HEAD + 2 * HALF, j, REST)[None, :]
        if HAS_NORM:
            square = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
            inverse = (1.0 / tl.sqrt(square / HEAD + eps))[:, None]
            low = low * inverse * _vector(norm, i, HALF)[None, :]
            high = high * inverse * _vector(norm + HALF, i, HALF)[None, :]
            rest = rest * inverse * _vector(norm + 2 * HALF, j, REST)[None, :]
        if HALF:
            cosine = cos + batch * cos_b
            sine = sin + batch * sin_b
            turned = low * _columns(cosine, t64, cos_t, i, kept, HALF) - high * _columns(
                sine, t64, sin_t, i, kept, HALF
            )
            high = high * _columns(cosine + HALF, t64, cos_t, i, kept, HALF) + low * _columns(
                sine + HALF, t64, sin_t, i, kept, HALF
            )
            low = turned
        for member in range(group):
            q = query + (first + member) * HEAD
            score = tl.zeros((BLOCK_T,), tl.float32)
            if HALF:
                score += tl.sum(low * _vector(q, i, HALF)[None, :], 1)
                score += tl.sum(high * _vector(q + HALF, i, HALF)[None, :], 1)
            if REST:
                score += tl.sum(rest * _vector(q + 2 * HALF, j, REST)[None, :], 1)
            tl.store(scores + (first + member) * T + t, tl.where(kept, score * scale, float("-inf")), mask=t < T)


@triton.jit
def _stored_scores_kernel(
    query,  # (B, H, D)
    keys,  # (B, H_kv, T, D), strides keys_b, keys_h, keys_t, 1
    keep,  # (B, T), strides keep_b, 1; read if HAS_KEEP
    scores,  # (B, H, T) float32
    T,
    D,
    heads,  # H_kv
    keys_b,
    keys_h,
    keys_t,
    keep_b,
    group,  # H / H_kv
    scale,
    HAS_KEEP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks = tl.cdiv(group, BLOCK_H)  # of query heads to a key/value head; they share its keys
    member = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = tl.program_id(0) // blocks % heads
    t = (tl.program_id(0) // blocks // heads) * BLOCK_T + tl.arange(0, BLOCK_T)
    batch = tl.program_id(1).to(tl.int64)
    kept = t < T
    if HAS_KEEP:
        kept = kept & (tl.load(keep + batch * keep_b + t, mask=kept, other=0) != 0)
    row = (batch * heads + head) * group + member
    score = tl.zeros((BLOCK_H, BLOCK_T), tl.float32)
    if tl.max(kept.to(tl.int32), 0) != 0:
        key = keys + batch * keys_b + head.to(tl.int64) * keys_h + t.to(tl.int64)[None, :] * keys_t
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            k = tl.load(key + d[:, None], mask=(d < D)[:, None] & kept[None, :], other=0.0)
            inside = (member < group)[:, None] & (d < D)[None, :]
            q = tl.load(query + row[:, None] * D + d[None, :], mask=inside, other=0.0)
            score = tl.dot(q.to(k.dtype), k, score, input_precision="ieee")
    score = tl.where(kept[None, :], score * scale, float("-inf"))
    tl.store(scores + row[:, None] * T + t[None, :], score, mask=(member < group)[:, None] & (t < T)[None, :])


def rebuilt_scores(
    query: Tensor,
    latent: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    keep: Tensor | None,
    scale: float,
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Returns the scores (B, H, T), float32, of keys rebuilt from ``latent``.

    ``query`` (B, H, d), already rotated; ``latent`` (B, T, R); ``factor`` (H_kv, d, R); ``bias`` (H_kv * d,);
    ``cos`` and ``sin`` (B, T, d_rot) with d_rot <= d; ``keep`` (B, T), bool; ``norm`` (d,), the weight of the root
    mean square norm of each head's key. d is at most ``MAX_HEAD``.
    """
    query, factor, latent = query.contiguous(), factor.contiguous(), _rows(latent)
    keep = None if keep is None else _rows(keep)
    batch, heads, width = query.shape
    context, rank = latent.shape[1:]
    assert width <= MAX_HEAD, width
    half = 0 if cos is None else cos.shape[-1] // 2
    rest = width - 2 * half
    cos = query if cos is None else _rows(cos)
    sin = query if sin is None else _rows(sin)
    scores = torch.empty(batch, heads, context, dtype=torch.float32, device=query.device)
    block_t = 128 if width <= 128 else 64
    _rebuilt_scores_kernel[(len(factor) * triton.cdiv(context, block_t), batch)](
        query,
        latent,
        factor,
        query if bias is None else bias.contiguous(),
        query if norm is None else norm.contiguous(),
        cos,
        sin,
        query if keep is None else keep,
        scores,
        context,
        rank,
        len(factor),
        *latent.stride()[:2],
        *cos.stride()[:2],
        *sin.stride()[:2],
        0 if keep is None else keep.stride(0),
        heads // len(factor),
        scale,
        eps,
        HEAD=width,
        HALF=half,
        REST=rest,
        HALF_PADDED=max(16, triton.next_power_of_2(half)),
        REST_PADDED=max(16, triton.next_power_of_2(rest)),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_KEEP=keep is not None,
        BLOCK_T=block_t,
        BLOCK_R=32 if latent.dtype == torch.float32 or width > 128 else 64,
        num_warps=8,
    )
    return scores


def stored_scores(query: Tensor, keys: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """Returns the scores (B, H, T), float32, of ``query`` (B, H, d) against ``keys`` (B, H_kv, T, d)."""
    query, keys = query.contiguous(), _rows(keys)
    keep = None if keep is None else _rows(keep)
    batch, heads, width = query.shape
    own, context = keys.shape[1:3]
    group = heads // own
    scores = torch.empty(batch, heads, context, dtype=torch.float32, device=query.device)
    block_h = max(16, min(64, triton.next_power_of_2(group)))
    block_t = 64
    _stored_scores_kernel[(own * triton.cdiv(group, block_h) * triton.cdiv(context, block_t), batch)](
        query,
        keys,
        query if keep is None else keep,
        scores,
        context,
        width,
        own,
        *keys.stride()[:3],
        0 if keep is None else keep.stride(0),
        group,
        scale,
        HAS_KEEP=keep is not None,
        BLOCK_H=block_h,
        BLOCK_T=block_t,
        BLOCK_D=64,
        num_warps=4,
    )
    return scores


def _rows(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` with its last dimension side by side; a slice of a longer cache is not copied."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
