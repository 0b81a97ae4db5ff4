"""What the objective reads of a model, and the divergences between what two models give.

A language model is read at its final hidden state and its frozen head. The divergence identity holds when the logits
are exactly W h + b. That is checked once per model; where it fails (soft-capping, logit scaling), the logits themselves
take the place of h and the identity matrix that of W. A classifier is read at its class distribution where truncations
are measured, and, as an encoder always is, at the last block's output where projectors are trained: the distribution is
then the softmax over the features of each position, which needs no labels.
Source: paper, sections 'Training Procedure' and 'Measured-KL rank allocation'.
"""

import logging
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.divergence import TeacherStatistic, divergence, label_statistic, teacher_statistic
from lsp_core.gram import NonFiniteError, evaluating
from lsp_core.inputs import Inputs, inputs_of, probe
from lsp_core.units import bias_of, find_blocks

Kind = Literal["lm", "classifier", "encoder"]
Purpose = Literal["measure", "train"]
log = logging.getLogger(__name__)


class Readout:
    """Reads ``model`` and measures divergences between distributions that it gives.

    ``kind``: "lm" gives a distribution over tokens at each position, "classifier" one over classes for each example,
    "encoder" features. ``head``: the linear head whose input ``outputs`` returns, or None.
    """

    def __init__(self, model: PreTrainedModel, inputs: Inputs | None = None, *, purpose: Purpose = "measure") -> None:
        self.model = model
        self.inputs = inputs or inputs_of(model)
        examples = probe(model)
        logits = self._probed_logits(examples)
        self.kind: Kind = "encoder" if logits is None else "lm" if logits.dim() == 3 else "classifier"
        self.reads_features = self.kind == "encoder" or (self.kind == "classifier" and purpose == "train")
        self.head: nn.Linear | None = None
        if self.kind == "lm" and logits is not None:
            head = model.get_output_embeddings()
            self.head = head if isinstance(head, nn.Linear) and self._head_is_all(head, examples, logits) else None
            if self.head is None:
                log.info("%s computes more than a linear head: full logits are used", type(model).__name__)
        self._positions: dict[tuple[int, ...], int] = {}  # by the shape of an example

    @torch.no_grad()
    def _probed_logits(self, examples: Tensor) -> Tensor | None:
        with evaluating(self.model):
            result = self.model(**self.inputs.arguments(examples, self.model))
        logits: Tensor | None = getattr(result, "logits", None)
        if logits is not None and not torch.isfinite(logits).all():
            raise NonFiniteError(
                f"{type(self.model).__name__}: the logits hold a NaN or an infinity: check weights and dtype"
            )
        return logits

    @torch.no_grad()
    def _head_is_all(self, head: nn.Linear, examples: Tensor, logits: Tensor) -> bool:
        with evaluating(self.model):
            hidden = self._stopped(head, examples)
        expected = F.linear(hidden, head.weight, head.bias)
        tolerance = 8 * torch.finfo(logits.dtype).eps * expected.abs().max()
        return expected.shape == logits.shape and bool((expected - logits).abs().max() <= tolerance)

    def outputs(self, batch: Tensor) -> Tensor:  # examples (B, ...) -> (B, P, D)
        """Returns what the distributions are made of, at P positions an example.

        The final hidden states; the logits, D = V, where the head does more than W h + b and for a classifier's
        classes, P = 1; or the last block's output.
        """
        if self.head is not None:
            return self._stopped(self.head, batch)
        if self.reads_features:
            return self._last_output(find_blocks(self.model)[-1], batch)
        logits: Tensor = self.model(**self.inputs.arguments(batch, self.model)).logits
        logits = logits if self.kind == "lm" else logits[:, None]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _stopped(self, module: nn.Module, batch: Tensor) -> Tensor:
        """Returns the input of ``module`` in a forward pass that ends there."""

        def reached(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _Reached(args[0])

        handle = module.register_forward_pre_hook(reached)
        try:
            self.model(**self.inputs.arguments(batch, self.model))
        except _Reached as found:
            return found.hidden
        finally:
            handle.remove()
        raise ValueError(f"{type(self.model).__name__} does not call its {type(module).__name__} in a forward pass")

    def _last_output(self, module: nn.Module, batch: Tensor) -> Tensor:
        """Returns the output of ``module``, of the last of its calls, in a forward pass."""
        outputs: list[Tensor] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            outputs[:] = [output[0] if isinstance(output, tuple) else output]

        handle = module.register_forward_hook(note)
        try:
            self.model(**self.inputs.arguments(batch, self.model))
        finally:
            handle.remove()
        if not outputs:
            raise ValueError(f"{type(self.model).__name__} does not call its {type(module).__name__} in a forward pass")
        return outputs[0]

    def kept(self, batch: Tensor) -> Tensor | None:  # -> (B, P)
        """Returns which positions count, or None where all do."""
        kept = self.inputs.kept(batch) if self.reads_features else None
        return None if kept is None else kept.to(self.model.device)

    def count(self, batch: Tensor, *, task: bool = False) -> int:
        """Returns how many distributions ``batch`` gives, or how many of them have a target of the task loss."""
        kept = self.kept(batch)
        if self.kind != "lm":
            if task or not self.reads_features:
                return len(batch)
            return len(batch) * self.positions(batch) if kept is None else int(kept.sum())
        if self.inputs.decoder_start is not None:
            return self.inputs.targets(batch).numel()
        return len(batch) * (batch.shape[1] - task)

    @torch.no_grad()
    def positions(self, batch: Tensor) -> int:
        """Returns the positions P whose features each example of ``batch`` gives."""
        shape = tuple(batch.shape[1:])
        if shape not in self._positions:
            with evaluating(self.model):
                self._positions[shape] = self.outputs(batch[:1]).shape[1]
        return self._positions[shape]

    @torch.no_grad()
    def statistic(self, outputs: Tensor) -> TeacherStatistic:  # (B, P, D) -> (B, P, ...)
        """Returns the statistic of the distributions that ``outputs`` give."""
        if self.head is not None:
            flat = teacher_statistic(outputs.flatten(0, 1), self.head.weight, bias_of(self.head))
            shape = outputs.shape[:2]
            return TeacherStatistic(
                m=flat.m.unflatten(0, shape), c=flat.c.unflatten(0, shape), entropy=flat.entropy.unflatten(0, shape)
            )
        log_p = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).log_softmax(-1)
        p = log_p.exp()
        return TeacherStatistic(m=p, c=p.new_zeros(p.shape[:-1]), entropy=-(p * log_p).sum(-1))

    def divergence(
        self, outputs: Tensor, teacher: TeacherStatistic, kept: Tensor | None = None
    ) -> Tensor:  # (B, P, D), (B, P, ...), (B, P) -> (n,)
        """Returns KL(teacher || model) in nats for each position, or for each of those in ``kept``."""
        outputs = outputs.flatten(0, 1) if kept is None else outputs[kept]
        teacher = teacher.flat() if kept is None else teacher[kept]
        if self.head is not None:
            return divergence(outputs, self.head.weight, bias_of(self.head), teacher)
        outputs = outputs.to(teacher.m.dtype)
        return outputs.logsumexp(-1) - (outputs * teacher.m).sum(-1) - teacher.c - teacher.entropy

    def losses(self, batch: Tensor, labels: Tensor | None = None) -> Tensor:  # examples (B, ...), (B,) -> (n,)
        """Returns the cross-entropy, in nats, of each next token, or of each example's label.

        Errors: ``ValueError`` where there is no task: an encoder, or a classifier without ``labels``.
        """
        if self.kind == "lm":
            outputs, targets = self.outputs(batch), batch.to(self.model.device)
            if self.inputs.decoder_start is not None:
                return self._cross_entropy(outputs, self.inputs.targets(targets))
            return self._cross_entropy(outputs[:, :-1], targets[:, 1:])
        if self.kind == "encoder" or labels is None:
            raise ValueError(
                f"{type(self.model).__name__} has no task loss {'' if self.kind == 'encoder' else 'without labels'}: "
                "use objective kl, or a labelled calibration set"
            )
        logits = self.class_logits(batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels.to(self.model.device), reduction="none")

    def class_logits(self, batch: Tensor) -> Tensor:  # -> (B, classes)
        """Returns a classifier's logits."""
        logits: Tensor = self.model(**self.inputs.arguments(batch, self.model)).logits
        return logits

    def _cross_entropy(self, outputs: Tensor, targets: Tensor) -> Tensor:  # (B, P, D), (B, P) -> (B * P,)
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
        if self.head is None:
            return F.cross_entropy(outputs, targets, reduction="none")
        weight, bias = self.head.weight, bias_of(self.head)
        return divergence(outputs, weight, bias, label_statistic(targets, weight, bias))


class _Reached(Exception):  # noqa: N818  (no error)
    """Ends a forward pass at the tensor that was wanted."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
