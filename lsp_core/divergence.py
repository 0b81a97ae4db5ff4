"""KL divergence and cross-entropy against a frozen head, without a stored vocabulary of logits.

Teacher and student share the head (W, b). With h the student's final hidden state and p the teacher's distribution,

    KL(p || q) = -H(p) + logsumexp(W h + b) - (h . m + c),    m = WT p,  c = b . p,

so a teacher costs D + 2 numbers a token. Cross-entropy is the same identity with m = w_y, c = b_y, H = 0. The gradient
with respect to h is WT q - m. Both directions run over chunks of the vocabulary with a running maximum.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class TeacherStatistic:
    """What the divergence needs of a teacher: ``m`` (..., D), ``c`` (...) and ``entropy`` (...) in nats."""

    m: Tensor
    c: Tensor
    entropy: Tensor

    def __getitem__(self, index: Any) -> "TeacherStatistic":
        return TeacherStatistic(m=self.m[index], c=self.c[index], entropy=self.entropy[index])

    def flat(self) -> "TeacherStatistic":
        """Returns the statistic with its positions in one dimension."""
        return TeacherStatistic(m=self.m.flatten(0, -2), c=self.c.flatten(), entropy=self.entropy.flatten())

    def to(self, device: torch.device) -> "TeacherStatistic":
        """Returns the statistic on ``device``."""
        return TeacherStatistic(m=self.m.to(device), c=self.c.to(device), entropy=self.entropy.to(device))


@torch.no_grad()
def teacher_statistic(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> TeacherStatistic:
    """Returns the statistic of p = softmax(W h + b): hidden states ``h`` (T, D), head ``weight`` (V, D), ``bias`` (V,).

    Computed in at least float32, with H(p) = logsumexp - h . m - c.
    """
    h, weight, bias = _at_least_float32(h, weight, bias)
    log_partition, m, c = _softmax_statistics(h, weight, bias)
    return TeacherStatistic(m=m, c=c, entropy=log_partition - (h * m).sum(-1) - c)


def label_statistic(labels: Tensor, weight: Tensor, bias: Tensor | None = None) -> TeacherStatistic:
    """Returns the statistic that makes ``divergence`` the cross-entropy, in nats, of ``labels`` (T,)."""
    _, weight, bias = _at_least_float32(weight[:0], weight[labels], None if bias is None else bias[labels])
    zeros = weight.new_zeros(len(labels))
    return TeacherStatistic(m=weight, c=zeros if bias is None else bias, entropy=zeros)


def divergence(h: Tensor, weight: Tensor, bias: Tensor | None, teacher: TeacherStatistic) -> Tensor:
    """Returns KL(p || softmax(W h + b)) in nats per token: (T, D), (V, D), (V,) -> (T,); differentiable in ``h``."""
    result: Tensor = _Divergence.apply(h, weight, bias, teacher.m, teacher.c, teacher.entropy)  # type: ignore[no-untyped-call]
    return result


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, m: Tensor, c: Tensor, entropy: Tensor
    ) -> Tensor:
        ctx.dtype = h.dtype
        h, weight, bias = _at_least_float32(h, weight, bias)
        if ctx.needs_input_grad[0]:
            log_partition, mean_row, _ = _softmax_statistics(h, weight, bias)
            ctx.save_for_backward(mean_row.sub_(m))
        else:
            log_partition = _log_partition(h, weight, bias)
        return log_partition - (h * m).sum(-1) - c - entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (direction,) = ctx.saved_tensors
        return (grad[:, None] * direction).to(ctx.dtype), None, None, None, None, None


def _at_least_float32(h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)
    return h.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _logit_chunks(h: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    for start in range(0, len(weight), VOCABULARY_CHUNK):
        rows = weight[start : start + VOCABULARY_CHUNK]
        offset = None if bias is None else bias[start : start + VOCABULARY_CHUNK]
        yield rows, offset, torch.nn.functional.linear(h, rows, offset)


def _log_partition(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # -> (T,)
    chunks = [torch.logsumexp(logits, -1) for _, _, logits in _logit_chunks(h, weight, bias)]
    return torch.stack(chunks).logsumexp(0)


def _softmax_statistics(h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logsumexp(W h + b) (T,), WT q (T, D), b . q (T,) with q the softmax, in one pass over the vocabulary."""
    top = h.new_full((len(h), 1), -torch.inf)
    total, mean_row, mean_bias = h.new_zeros(len(h), 1), torch.zeros_like(h), h.new_zeros(len(h), 1)
    for rows, offset, logits in _logit_chunks(h, weight, bias):
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        rescale = (top - new_top).exp_()
        mass = logits.sub_(new_top).exp_()
        total.mul_(rescale).add_(mass.sum(-1, keepdim=True))
        mean_row.mul_(rescale).addmm_(mass, rows)
        if offset is not None:
            mean_bias.mul_(rescale).add_(mass @ offset[:, None])
        top = new_top
    return (top + total.log()).squeeze(-1), mean_row.div_(total), mean_bias.div_(total).squeeze(-1)
