"""The torch custom ops of namespace ``lsp``: a Triton kernel on CUDA, plain torch elsewhere.

Plain torch also runs on CUDA where triton is missing or a shape is out of the kernels' range, which each function
states. The ops are opaque to torch.compile and safe to capture in CUDA graphs: they allocate their outputs and read
nothing back. ``low_rank_linear`` and the attentions are for inference: where a gradient is wanted they are plain torch.

B batch, H query heads, H_kv key/value heads, d head width, R_k and R_v latent widths; others as in design.
"""

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from lsp_core import op_shapes, plain

OptionalTensor = Optional[Tensor]  # noqa: UP045  as the schema's type wants it spelled

HAS_TRITON = importlib.util.find_spec("triton") is not None
NARROW = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (torch.float32, *NARROW)
PROJECT_ALIGNMENT = 16  # elements, to which the projected coordinates are padded: rows that matrix units load whole


def low_rank_linear(
    x: Tensor, a: Tensor, bs: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Returns B_m A x + bias_m of each member: (..., D_in), (R, D_in), (D_out_m, R), (D_out_m,) -> (..., D_out_m).

    The kernels take 1 to 16 tokens and up to 4 members of one dtype, float32, bfloat16 or float16.
    """
    biases = [None] * len(bs) if biases is None else biases
    op_shapes.require_low_rank(x, a, bs, biases)
    if not x.is_cuda or _differentiates(x, a, *bs, *biases):
        return plain.low_rank_linear(x, a, bs, biases)
    outputs: list[Tensor] = _low_rank_linear(x, a, list(bs), list(biases))
    return outputs


def latent_decode_attention(
    query: Tensor,
    latent_k: Tensor,
    latent_v: Tensor,
    key_factor: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    keep: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Returns the attention of one query position over a latent: softmax(scale q . k) latent_v, (B, H, R_v).

    k of head h at position t is ``latent_k`` (B, T, R_k) times ``key_factor`` (H_kv, d, R_k) plus ``key_bias``
    (H_kv * d,), normed by its root mean square with weight ``norm`` (d,) and ``eps``, then its first d_rot columns
    rotated in halves by ``cos`` and ``sin`` (B, T, d_rot). ``query`` (B, H, d) is normed and rotated already; H is a
    multiple of H_kv. ``keep`` (B, T), bool, says which positions count; a sequence that keeps none gets zeros.
    Without rotation and norm no key is rebuilt: the factor is absorbed into the query. The kernels take d up to 256 and
    tensors of one dtype, float32, bfloat16 or float16.
    """
    op_shapes.require_decode_attention(query, latent_k, latent_v, key_factor, key_bias, cos, sin, keep, norm)
    arguments = (query, latent_k, latent_v, key_factor, key_bias, cos, sin, keep, float(scale), norm, float(eps))
    if _differentiates(query, latent_k, latent_v, key_factor, key_bias, norm):
        return plain.latent_decode_attention(*arguments)
    result: Tensor = _latent_decode_attention(*arguments)
    return result


def latent_value_attention(
    query: Tensor, keys: Tensor, latent_v: Tensor, *, scale: float, keep: Tensor | None = None
) -> Tensor:
    """Returns softmax(scale q . k) latent_v with stored, rotated ``keys`` (B, H_kv, T, d): -> (B, H, R_v).

    ``query`` (B, H, d), ``latent_v`` (B, T, R_v), ``keep`` (B, T) as in ``latent_decode_attention``, any d.
    """
    op_shapes.require_value_attention(query, keys, latent_v, keep)
    if _differentiates(query, keys, latent_v):
        return plain.latent_value_attention(query, keys, latent_v, keep, float(scale))
    result: Tensor = _latent_value_attention(query, keys, latent_v, keep, float(scale))
    return result


def project(x: Tensor, u: Tensor, scales: Sequence[Tensor]) -> list[Tensor]:
    """Returns x - ((x U) o s_m) UT for each of ``scales``, (K,): (..., D), (D, K) -> (..., D); differentiable in x, U.

    The kernels take up to 4 scales, and x and U of one dtype: bfloat16, float16, or float32 where matrix products may
    run in TF32 (``torch.backends.cuda.matmul.fp32_precision``).
    """
    op_shapes.require_projection(x, u, scales)
    if _projects_by_kernel(x, u, len(scales)):
        outputs: list[Tensor] = _project(x, u, torch.stack(tuple(scales)))
        return outputs[:-1]
    return plain.project(x, u, scales)


def softmax_statistics(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logsumexp(W h + b), WT q and b . q with q the softmax: (T, D), (V, D), (V,) -> (T,), (T, D), (T,).

    In at least float32, in one pass over the vocabulary, ``chunk`` rows of the head at a time. Not differentiable.
    A bias of -inf rules a token out: it counts as 0 in b . q.
    """
    op_shapes.require_head("softmax_statistics", h, weight, bias)
    if not h.is_cuda:
        return plain.softmax_statistics(h, weight, bias, chunk)
    result: tuple[Tensor, Tensor, Tensor] = _softmax_statistics(h, weight, bias, chunk)
    return result


def log_partition(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """Returns logsumexp(W h + b), (T,), as ``softmax_statistics`` does."""
    op_shapes.require_head("log_partition", h, weight, bias)
    if not h.is_cuda:
        return plain.log_partition(h, weight, bias, chunk)
    result: Tensor = _log_partition(h, weight, bias, chunk)
    return result


@torch.library.custom_op("lsp::low_rank_linear", mutates_args=())
def _low_rank_linear(x: Tensor, a: Tensor, bs: list[Tensor], biases: list[OptionalTensor]) -> list[Tensor]:
    return plain.low_rank_linear(x, a, bs, biases)


@_low_rank_linear.register_fake
def _(x: Tensor, a: Tensor, bs: list[Tensor], biases: list[OptionalTensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(b)) for b in bs]


def low_rank_linear_kernel(x: Tensor, a: Tensor, bs: list[Tensor], biases: list[OptionalTensor]) -> list[Tensor]:
    from lsp_kernels import low_rank_linear as kernel

    tokens = x.numel() // max(1, x.shape[-1])
    inside = 1 <= tokens <= kernel.MAX_TOKENS and 1 <= len(bs) <= kernel.MAX_MEMBERS
    if not inside or not _for_kernels(x, a, *bs):
        return plain.low_rank_linear(x, a, bs, biases)
    with _device_of(x):
        return kernel.low_rank_linear(x, a, bs, biases)


@torch.library.custom_op("lsp::latent_decode_attention", mutates_args=())
def _latent_decode_attention(
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
    rotation = (cos, sin, keep, scale, norm, eps)
    return plain.latent_decode_attention(query, latent_k, latent_v, key_factor, key_bias, *rotation)


@_latent_decode_attention.register_fake
def _(query: Tensor, latent_k: Tensor, latent_v: Tensor, key_factor: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], latent_v.shape[-1])


def latent_decode_attention_kernel(
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
    from lsp_kernels import latent_scores, latent_values

    if cos is None and norm is None:
        absorbed = plain.absorbed_query(query, key_factor)
        return latent_value_attention_kernel(absorbed, latent_k[:, None], latent_v, keep, scale)
    rest = (key_factor, key_bias, cos, sin, keep, scale, norm, eps)
    inside = query.shape[-1] <= latent_scores.MAX_HEAD and query.shape[:2].numel() <= latent_values.MAX_ROWS
    if not inside or not _for_kernels(query, latent_k, latent_v, key_factor):
        return plain.latent_decode_attention(query, latent_k, latent_v, *rest)
    with _device_of(query):
        scores = latent_scores.rebuilt_scores(query, latent_k, *rest)
        return latent_values.aggregate(scores, latent_v, keep, query.dtype)


@torch.library.custom_op("lsp::latent_value_attention", mutates_args=())
def _latent_value_attention(query: Tensor, keys: Tensor, latent_v: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    return plain.latent_value_attention(query, keys, latent_v, keep, scale)


@_latent_value_attention.register_fake
def _(query: Tensor, keys: Tensor, latent_v: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], latent_v.shape[-1])


def latent_value_attention_kernel(
    query: Tensor, keys: Tensor, latent_v: Tensor, keep: Tensor | None, scale: float
) -> Tensor:
    from lsp_kernels import latent_scores, latent_values

    if query.shape[:2].numel() > latent_values.MAX_ROWS or not _for_kernels(query, keys, latent_v):
        return plain.latent_value_attention(query, keys, latent_v, keep, scale)
    with _device_of(query):
        scores = latent_scores.stored_scores(query, keys, keep, scale)
        return latent_values.aggregate(scores, latent_v, keep, query.dtype)


@torch.library.custom_op("lsp::project", mutates_args=())
def _project(x: Tensor, u: Tensor, scales: Tensor) -> list[Tensor]:
    """Returns the M projected x and, for the backward pass, (x U) o s_m, (M, T, K), K padded with zeros."""
    flat = x.reshape(-1, len(u))
    narrow = (flat @ u) * scales[:, None]
    results = [(flat - one @ u.T).view(x.shape) for one in narrow]
    return [*results, F.pad(narrow, (0, -u.shape[1] % PROJECT_ALIGNMENT))]


@_project.register_fake
def _(x: Tensor, u: Tensor, scales: Tensor) -> list[Tensor]:
    width = u.shape[1] + -u.shape[1] % PROJECT_ALIGNMENT
    narrow = x.new_empty(len(scales), x.numel() // len(u), width)
    return [*(x.new_empty(x.shape) for _ in range(len(scales))), narrow]


def project_kernel(x: Tensor, u: Tensor, scales: Tensor) -> list[Tensor]:
    from lsp_kernels import projected

    assert projected.ALIGNMENT == PROJECT_ALIGNMENT
    with _device_of(x):
        return projected.project(x, u, scales)


@torch.library.custom_op("lsp::project_backward", mutates_args=())
def _project_backward(
    grads: list[Tensor], x: Tensor, u: Tensor, scales: Tensor, narrow: Tensor
) -> tuple[Tensor, Tensor]:
    flat = x.reshape(-1, len(u))
    each = torch.stack([grad.reshape(-1, len(u)) for grad in grads])
    inner = ((each @ u) * scales[:, None]).sum(0)
    u_grad = flat.T @ inner + (each.mT @ narrow[..., : u.shape[1]]).sum(0)
    return (each.sum(0) - inner @ u.T).view(x.shape), u_grad.neg_()


@_project_backward.register_fake
def _(grads: list[Tensor], x: Tensor, u: Tensor, scales: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), u.new_empty(u.shape)


def project_backward_kernel(
    grads: list[Tensor], x: Tensor, u: Tensor, scales: Tensor, narrow: Tensor
) -> tuple[Tensor, Tensor]:
    from lsp_kernels import projected

    with _device_of(x):
        return projected.project_backward(grads, x, u, scales, narrow)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[-1])


def _differentiate_project(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor, Tensor, None]:
    x, u, scales, narrow = ctx.saved_tensors
    each = [x.new_zeros(x.shape) if grad is None else grad for grad in grads[:-1]]
    return *_project_backward(each, x, u, scales, narrow), None


_project.register_autograd(_differentiate_project, setup_context=_keep_for_backward)


@torch.library.custom_op("lsp::softmax_statistics", mutates_args=())
def _softmax_statistics(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    return plain.softmax_statistics(h, weight, bias, chunk)


@_softmax_statistics.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = h.new_empty(h.shape, dtype=plain.statistics_dtype(h, weight))
    return wide.new_empty(len(h)), wide, wide.new_empty(len(h))


def softmax_statistics_kernel(
    h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    from lsp_kernels import softmax

    if not h.numel() or plain.statistics_dtype(h, weight) != torch.float32 or chunk > softmax.MAX_CHUNK:
        return plain.softmax_statistics(h, weight, bias, chunk)
    with _device_of(h):
        return softmax.softmax_statistics(h, weight, bias, chunk)


@torch.library.custom_op("lsp::log_partition", mutates_args=())
def _log_partition(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    return plain.log_partition(h, weight, bias, chunk)


@_log_partition.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    return h.new_empty(len(h), dtype=plain.statistics_dtype(h, weight))


def log_partition_kernel(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    from lsp_kernels import softmax

    if not h.numel() or plain.statistics_dtype(h, weight) != torch.float32 or chunk > softmax.MAX_CHUNK:
        return plain.log_partition(h, weight, bias, chunk)
    with _device_of(h):
        return softmax.log_partition(h, weight, bias, chunk)


if HAS_TRITON:
    _low_rank_linear.register_kernel("cuda", low_rank_linear_kernel)
    _latent_decode_attention.register_kernel("cuda", latent_decode_attention_kernel)
    _latent_value_attention.register_kernel("cuda", latent_value_attention_kernel)
    _project.register_kernel("cuda", project_kernel)
    _project_backward.register_kernel("cuda", project_backward_kernel)
    _softmax_statistics.register_kernel("cuda", softmax_statistics_kernel)
    _log_partition.register_kernel("cuda", log_partition_kernel)


def _differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _for_kernels(first: Tensor, *others: Tensor) -> bool:
    """Of one dtype that they take, and none of them empty."""
    same = all(tensor.dtype == first.dtype for tensor in others)
    return first.dtype in KERNEL_DTYPES and same and first.numel() > 0 and all(tensor.numel() for tensor in others)


def _projects_by_kernel(x: Tensor, u: Tensor, scales: int) -> bool:
    if not (HAS_TRITON and x.is_cuda and 1 <= scales <= 4 and _for_kernels(x, u)):
        return False
    return x.dtype in NARROW or _tf32()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tf32() -> bool:
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of ``tensor`` the current one: kernels are launched there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
