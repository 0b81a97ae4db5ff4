"""What the objective reads: the final hidden state and the frozen head, or the logits where the head does more.

The divergence identity holds when the model's logits are exactly W h + b. That is checked once per model. Where it
fails (soft-capping, logit scaling), the logits themselves take the place of h and the identity matrix that of W.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.divergence import TeacherStatistic, divergence, label_statistic, teacher_statistic
from lsp_core.gram import NonFiniteError
from lsp_core.layers import bias_of

log = logging.getLogger(__name__)


class Readout:
    """Reads a causal language model's features and measures divergences between its next-token distributions."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        head = model.get_output_embeddings()
        self.head = head if isinstance(head, nn.Linear) and self._head_is_all(head) else None
        if self.head is None:
            log.info("%s computes more than a linear head: full logits are used", type(model).__name__)

    @torch.no_grad()
    def _head_is_all(self, head: nn.Linear) -> bool:
        was_training = self.model.training
        self.model.eval()
        ids = torch.arange(8, device=self.model.device)[None] % self.model.config.get_text_config().vocab_size
        logits = self.model(input_ids=ids, use_cache=False).logits
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        self.model.train(was_training)
        if not torch.isfinite(logits).all():
            raise NonFiniteError(
                f"{type(self.model).__name__}: the logits hold a NaN or an infinity: check weights and dtype"
            )
        expected = F.linear(hidden, head.weight, head.bias)
        tolerance = 8 * torch.finfo(logits.dtype).eps * expected.abs().max()
        return expected.shape == logits.shape and bool((expected - logits).abs().max() <= tolerance)

    def features(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, D), D = V where the head is not linear
        """Returns the final hidden states, or the logits where the head does more than W h + b."""
        if self.head is None:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    @torch.no_grad()
    def statistic(self, features: Tensor) -> TeacherStatistic:  # (T, D)
        """Returns the statistic of the distributions that ``features`` give."""
        if self.head is not None:
            return teacher_statistic(features, self.head.weight, bias_of(self.head))
        log_p = features.log_softmax(-1)
        p = log_p.exp()
        return TeacherStatistic(m=p, c=p.new_zeros(len(p)), entropy=-(p * log_p).sum(-1))

    def divergence(self, features: Tensor, teacher: TeacherStatistic) -> Tensor:  # (T, D) -> (T,)
        """Returns KL(teacher || model) in nats for each token."""
        if self.head is not None:
            return divergence(features, self.head.weight, bias_of(self.head), teacher)
        return features.logsumexp(-1) - (features * teacher.m).sum(-1) - teacher.c - teacher.entropy

    def cross_entropy(self, features: Tensor, labels: Tensor) -> Tensor:  # (T, D), (T,) -> (T,)
        """Returns the cross-entropy of ``labels`` in nats for each token."""
        if self.head is None:
            return F.cross_entropy(features, labels, reduction="none")
        weight, bias = self.head.weight, bias_of(self.head)
        return divergence(features, weight, bias, label_statistic(labels, weight, bias))
