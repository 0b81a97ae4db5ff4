"""The ops of ``lsp_core.ops`` in plain torch: what runs on CPU, and wherever no kernel applies.

Sums run in at least float32. B batch, H query heads, H_kv key/value heads, d head width, R_k and R_v latent widths.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CONTEXT_CHUNK = 2048  # positions whose keys are rebuilt at a time


def low_rank_linear(x: Tensor, a: Tensor, bs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns B_m A x + bias_m of each member, the latent computed once."""
    latent = F.linear(x, a)
    return [F.linear(latent, b, bias) for b, bias in zip(bs, biases, strict=True)]


def latent_decode_attention(
    query: Tensor,
    latent_k: Tensor,
    latent_v: Tensor,
    key_factor: Tensor,
    key_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    keep: Tensor | None,
    scale: float,
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Returns the attention of ``query`` over ``latent_v``, its keys rebuilt a chunk of the context at a time."""
    if cos is None and norm is None:
        absorbed = absorbed_query(query, key_factor)
        return latent_value_attention(absorbed, latent_k[:, None], latent_v, keep, scale)
    heads, width, rank = key_factor.shape
    accumulate = torch.promote_types(query.dtype, torch.float32)

    def keys(part: slice) -> Tensor:  # (B, H_kv, t, d)
        key: Tensor = F.linear(latent_k[:, part], key_factor.reshape(-1, rank), key_bias).to(accumulate)
        key = key.view(*key.shape[:2], heads, width).transpose(1, 2)
        if norm is not None:
            key = key * (key.square().mean(-1, keepdim=True) + eps).rsqrt() * norm
        return key if cos is None or sin is None else _rotated(key, cos[:, None, part], sin[:, None, part])

    return _attention(query, keys, heads, latent_v, keep, scale)


def absorbed_query(query: Tensor, key_factor: Tensor) -> Tensor:  # (B, H, d), (H_kv, d, R_k) -> (B, H, R_k)
    """Returns the query that scores a latent as ``query`` scores its keys; a key bias shifts all of a head's scores."""
    grouped = query.unflatten(1, (len(key_factor), query.shape[1] // len(key_factor)))
    return grouped_product(grouped, key_factor[None]).flatten(1, 2)


def grouped_product(x: Tensor, matrices: Tensor) -> Tensor:  # (B, G, m, a), (B or 1, G, a, b) -> (B, G, m, b)
    """Returns x @ matrices without a copy of the matrices, which may lie in memory in any order of B and G.

    torch.matmul makes one where the strides of B and G are not those of one dimension, as of keys (B, T, G, d), and
    where B is repeated.
    """
    batch, groups, _, b = matrices.shape
    if batch == 1:
        rows = x.transpose(0, 1).flatten(1, 2)  # (G, B m, a)
        product: Tensor = rows @ matrices[0]
        by_row: Tensor = product.unflatten(1, (len(x), x.shape[2]))
        return by_row.transpose(0, 1)
    if groups == 1 or matrices.stride(0) == groups * matrices.stride(1):
        return x @ matrices
    result = x.new_empty(*x.shape[:3], b)
    for one in range(min(batch, groups)):
        part = (one,) if batch <= groups else (slice(None), one)
        result[part] = x[part] @ matrices[part]
    return result


def latent_value_attention(query: Tensor, keys: Tensor, latent_v: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """Returns the attention of ``query`` (B, H, d) over ``latent_v``, with ``keys`` (B, H_kv, T, d) as they are."""
    return _attention(query, lambda part: keys[:, :, part], keys.shape[1], latent_v, keep, scale)


def _attention(
    query: Tensor, keys: Callable[[slice], Tensor], heads: int, values: Tensor, keep: Tensor | None, scale: float
) -> Tensor:
    """Returns softmax(scale q k) @ values, (B, H, R_v), over chunks of the context with a running maximum."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped: Tensor = query.to(dtype).unflatten(1, (heads, query.shape[1] // heads))
    top = grouped.new_full((*query.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(top)
    result = grouped.new_zeros(*query.shape[:2], values.shape[-1])
    for start in range(0, values.shape[1], CONTEXT_CHUNK):
        part = slice(start, start + CONTEXT_CHUNK)
        kept = None if keep is None else keep[:, part]
        if kept is not None and kept.device.type == "cpu" and not kept.any():
            continue
        score = grouped_product(grouped, keys(part).to(dtype).transpose(-1, -2)).flatten(1, 2) * scale
        value = values[:, part].to(dtype)
        if kept is not None:  # what is not kept may hold anything, NaN included
            score = score.masked_fill(~kept[:, None], -torch.inf)
            value = value.masked_fill(~kept[:, :, None], 0)
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        origin = new_top.masked_fill(new_top == -torch.inf, 0)
        rescale, mass = (top - origin).exp(), (score - origin).exp()
        total = total * rescale + mass.sum(-1, keepdim=True)
        result = result * rescale + mass @ value
        top = new_top
    return (result / total.masked_fill(total == 0, 1)).to(query.dtype)


def _rotated(key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns ``key`` (..., d) with its first d_rot columns rotated by ``cos`` and ``sin`` (..., d_rot)."""
    turned, rest = key[..., : cos.shape[-1]], key[..., cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([turned, rest], -1)


def project(x: Tensor, u: Tensor, scales: Sequence[Tensor]) -> list[Tensor]:
    """Returns x - ((x U) o s_m) UT for each s_m, differentiable in x and U."""
    narrow = x @ u
    return [x - F.linear(narrow * scale, u) for scale in scales]


def logit_chunks(
    h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Yields rows of the head, their bias and their logits, ``chunk`` tokens of the vocabulary at a time."""
    dtype = statistics_dtype(h, weight)
    h = h.to(dtype)
    for start in range(0, len(weight), chunk):
        rows = weight[start : start + chunk].to(dtype)
        offset = None if bias is None else bias[start : start + chunk].to(dtype)
        yield rows, offset, F.linear(h, rows, offset)


def log_partition(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """Returns logsumexp(W h + b), (T,)."""
    chunks = [torch.logsumexp(logits, -1) for _, _, logits in logit_chunks(h, weight, bias, chunk)]
    return torch.stack(chunks).logsumexp(0)


def softmax_statistics(
    h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:  # (T, D), (V, D), (V,) -> (T,), (T, D), (T,)
    """Returns logsumexp(W h + b), WT q and b . q with q the softmax, in one pass over the vocabulary."""
    dtype = statistics_dtype(h, weight)
    top = h.new_full((len(h), 1), -torch.inf, dtype=dtype)
    total, mean_bias = torch.zeros_like(top), torch.zeros_like(top)
    mean_row = h.new_zeros(h.shape, dtype=dtype)
    for rows, offset, logits in logit_chunks(h, weight, bias, chunk):
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        origin = new_top.masked_fill(new_top == -torch.inf, 0)  # so far all tokens may be ruled out
        rescale = (top - origin).exp_()
        mass = logits.sub_(origin).exp_()
        total.mul_(rescale).add_(mass.sum(-1, keepdim=True))
        mean_row.mul_(rescale).addmm_(mass, rows)
        if offset is not None:
            finite = offset.masked_fill(offset == -torch.inf, 0)  # where it is not the mass is 0
            mean_bias.mul_(rescale).add_(mass @ finite[:, None])
        top = new_top
    return (top + total.log()).squeeze(-1), mean_row.div_(total), mean_bias.div_(total).squeeze(-1)


def statistics_dtype(h: Tensor, weight: Tensor) -> torch.dtype:
    """Returns the dtype that the statistics of a softmax are computed in: at least float32."""
    return torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)
