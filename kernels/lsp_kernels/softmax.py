"""Statistics of softmax(W h + b) over chunks of a long vocabulary, with a running maximum.

The logits of a chunk come from the library's matrix product; then one pass does maximum, rescale, exponent and sum. A
program holds a token's row of the chunk: it reads the logits once, brings the state (maximum, sum, sum weighted by the
bias) forward, and writes the unnormalized mass exp(logit - maximum) in place of the logits. In bfloat16 nothing is
widened for the products: logits are exact products summed in float32, and the mass is written as high + low, which
together hold 16 binary digits and have the range of float32.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_CHUNK = 16384


@triton.jit
def _chunk_kernel(
    logits,  # (T, C) float32, rows stride apart; without the bias
    bias,  # (C,), read if HAS_BIAS
    tops,  # (T,) float32, the running maximum
    totals,  # (T,) float32, the running sum of exp(logit - maximum)
    weighted,  # (T,) float32, that sum weighted by the bias
    rescales,  # (T,) float32, exp(old maximum - new maximum)
    high,  # (T, C), written if SPLIT
    low,  # likewise
    C,
    stride,
    HAS_BIAS: tl.constexpr,
    MASS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    row = logits + token * stride + column
    logit = tl.load(row, mask=inside, other=float("-inf"))
    if HAS_BIAS:
        offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        logit += offset
    old = tl.load(tops + token)
    top = tl.maximum(old, tl.max(logit, 0))
    origin = tl.where(top == float("-inf"), 0.0, top)  # so far all tokens may be ruled out
    rescale = tl.exp(old - origin)
    mass = tl.exp(logit - origin)
    tl.store(tops + token, top)
    tl.store(totals + token, tl.load(totals + token) * rescale + tl.sum(mass, 0))
    if MASS:
        tl.store(rescales + token, rescale)
        if HAS_BIAS:
            finite = tl.where(offset == float("-inf"), 0.0, offset)  # where it is not the mass is 0
            tl.store(weighted + token, tl.load(weighted + token) * rescale + tl.sum(mass * finite, 0))
        if SPLIT:
            coarse = mass.to(high.dtype.element_ty)
            tl.store(high + token * C + column, coarse, mask=inside)
            tl.store(low + token * C + column, (mass - coarse.to(tl.float32)).to(low.dtype.element_ty), mask=inside)
        else:
            tl.store(row, mass, mask=inside)


def softmax_statistics(
    h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:  # (T, D), (V, D), (V,) -> (T,), (T, D), (T,), all float32
    """Returns logsumexp(W h + b), WT q and b . q with q the softmax; ``chunk`` is at most ``MAX_CHUNK``."""
    state = _State(h)
    mean_row = h.new_zeros(h.shape, dtype=torch.float32)
    for rows, offset, logits in _chunks(h, weight, bias, chunk):
        if h.dtype == rows.dtype == torch.bfloat16:
            high, low = torch.empty(2, *logits.shape, dtype=h.dtype, device=h.device)
            state.add(logits, offset, mass=True, split=(high, low))
            mean_row.mul_(state.rescales[:, None]).add_(_wide_product(high, rows)).add_(_wide_product(low, rows))
        else:
            state.add(logits, offset, mass=True)
            mean_row.mul_(state.rescales[:, None]).addmm_(logits, rows.float())
    return state.log_partition(), mean_row.div_(state.totals[:, None]), state.weighted / state.totals


def log_partition(h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """Returns logsumexp(W h + b), (T,) float32; ``chunk`` is at most ``MAX_CHUNK``."""
    state = _State(h)
    for _, offset, logits in _chunks(h, weight, bias, chunk):
        state.add(logits, offset, mass=False)
    return state.log_partition()


class _State:
    """T softmaxes so far: ``tops``, ``totals``, ``weighted`` and the last ``rescales``, each (T,), float32."""

    def __init__(self, h: Tensor) -> None:
        self.tops = h.new_full((len(h),), -torch.inf, dtype=torch.float32)
        self.totals, self.weighted = torch.zeros_like(self.tops), torch.zeros_like(self.tops)
        self.rescales = torch.empty_like(self.tops)

    def add(
        self, logits: Tensor, bias: Tensor | None, *, mass: bool, split: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Adds a chunk, ``logits`` (T, C) without the ``bias`` (C,).

        With ``mass``, exp(logit + bias - maximum) takes the place of the logits, or is written as a sum of ``split``.
        """
        tokens, columns = logits.shape
        assert columns <= MAX_CHUNK, columns
        block = triton.next_power_of_2(columns)
        high, low = (logits, logits) if split is None else split
        _chunk_kernel[(tokens,)](
            logits,
            logits if bias is None else bias,
            self.tops,
            self.totals,
            self.weighted,
            self.rescales,
            high,
            low,
            columns,
            logits.stride(0),
            HAS_BIAS=bias is not None,
            MASS=mass,
            SPLIT=split is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )

    def log_partition(self) -> Tensor:
        return self.tops + self.totals.log()


def _chunks(
    h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Yields rows of the head, their bias, and their logits in float32, without the bias."""
    bias = None if bias is None else bias.contiguous()
    for start in range(0, len(weight), chunk):
        rows = weight[start : start + chunk]
        yield rows, None if bias is None else bias[start : start + chunk], _wide_product(h, rows.T)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in float32, of narrow factors without widening them where the library can."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
