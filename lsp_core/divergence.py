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

from lsp_core.ops import log_partition, softmax_statistics

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
    log_p, m, c = softmax_statistics(h, weight, bias, VOCABULARY_CHUNK)
    return TeacherStatistic(m=m, c=c, entropy=log_p - (h * m).sum(-1) - c)


def label_statistic(labels: Tensor, weight: Tensor, bias: Tensor | None = None) -> TeacherStatistic:
    """Returns the statistic that makes ``divergence`` the cross-entropy, in nats, of ``labels`` (T,), all from 0 on."""
    m = _at_least_float32(weight[labels])
    zeros = m.new_zeros(len(labels))
    return TeacherStatistic(m=m, c=zeros if bias is None else _at_least_float32(bias[labels]), entropy=zeros)


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
        if ctx.needs_input_grad[0]:
            log_q, mean_row, _ = softmax_statistics(h, weight, bias, VOCABULARY_CHUNK)
            ctx.save_for_backward(mean_row.sub_(m))
        else:
            log_q = log_partition(h, weight, bias, VOCABULARY_CHUNK)
        return log_q - (h * m).sum(-1) - c - entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (direction,) = ctx.saved_tensors
        return (grad[:, None] * direction).to(ctx.dtype), None, None, None, None, None


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
