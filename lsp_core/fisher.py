"""The diagonal Fisher of the calibration loss: a quadratic guess of what a truncation costs, without running it.

F = mean over sequences of the squared gradient of a sequence's summed loss with respect to the members' weights, and

    cost_u(k) = 1/2 sum over the members' entries of F (W - W_k)^2 / (predictions a sequence), in nats a prediction,

W_k the weight with the truncation that the basis prescribes. The loss is that of the next token of the text; where
there is no next token, that of labels drawn from the model's own distribution.
Source: paper, section 'Ablations', table 'Rank allocation' ("Diagonal Fisher").
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.gram import NonFiniteError, Progress, evaluating
from lsp_core.inputs import Inputs
from lsp_core.readout import Readout
from lsp_core.sensitivity import projected_weight
from lsp_core.units import Unit, weight_of


class Fisher:
    """Estimates Delta_u(k) of equation 4 of the paper by the diagonal Fisher on ``examples`` (B, ...).

    ``bases`` holds the ordered basis (D, D) of each unit; ``seed`` draws the labels, where they are drawn. Takes one
    backward pass a sequence, and keeps one number in float32 at least for each weight.
    Errors: ``NonFiniteError`` if a sequence's loss or the Fisher is not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        units: Sequence[Unit],
        bases: Mapping[str, Tensor],
        examples: Tensor,
        *,
        inputs: Inputs | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.bases = bases
        self.layers = {name: model.get_submodule(name) for unit in units for name in unit.members}
        self.diagonal: dict[str, Tensor] = {}  # of each layer, shaped as its parameter
        self.predictions = 0.0  # a sequence
        draw = torch.Generator().manual_seed(seed)
        with ExitStack() as stack:
            stack.enter_context(evaluating(model))
            readout = Readout(model, inputs)
            weights = {name: _parameter(layer) for name, layer in self.layers.items()}
            stack.enter_context(_differentiating(model, weights.values()))
            stack.enter_context(torch.enable_grad())
            for name, weight in weights.items():
                self.diagonal[name] = torch.zeros_like(
                    weight, dtype=torch.promote_types(weight.dtype, torch.float32), requires_grad=False
                )
                handle = weight.register_post_accumulate_grad_hook(_squaring(self.diagonal[name]))
                stack.callback(handle.remove)
            for index in range(len(examples)):
                losses = _losses(readout, examples[index : index + 1], draw)
                loss = losses.sum()
                if not torch.isfinite(loss):
                    raise NonFiniteError(f"sequence {index} has a loss of {loss.item()}: check weights and dtype")
                loss.backward()
                self.predictions += len(losses) / len(examples)
                if progress is not None:
                    progress(index + 1, len(examples))
        for name, diagonal in self.diagonal.items():
            diagonal.div_(len(examples))
            if not torch.isfinite(diagonal).all():
                raise NonFiniteError(f"the Fisher of layer {name} is not finite: check the model's weights and dtype")

    @torch.no_grad()
    def measure(self, name: str, count: int) -> float:
        """Returns the estimate, in nats a prediction, for the last ``count`` directions of unit ``name``."""
        unit, q, total = self.units[name], self.bases[name], 0.0
        for member in unit.members:
            layer = self.layers[member]
            weight = weight_of(layer).to(q)
            change = weight - projected_weight(weight, q, count, unit)
            diagonal = self.diagonal[member] if weight_of(layer) is layer.weight else self.diagonal[member].T
            total += (diagonal.to(q) * change.square()).sum(dtype=torch.float64).item()
        return total / (2 * self.predictions)


def _losses(readout: Readout, batch: Tensor, draw: torch.Generator) -> Tensor:  # one example -> (n,)
    """Returns the losses of one example: of its next tokens, or of labels drawn from what the model gives."""
    if readout.kind == "lm":
        return readout.losses(batch)
    outputs, kept = readout.outputs(batch), readout.kept(batch)
    logits = outputs.flatten(0, 1) if kept is None else outputs[kept]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shares = logits.detach().softmax(-1).cpu()
    labels = torch.multinomial(shares, 1, generator=draw)[:, 0]
    return F.cross_entropy(logits, labels.to(logits.device), reduction="none")


def _parameter(layer: nn.Module) -> nn.Parameter:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _squaring(diagonal: Tensor) -> Callable[[Tensor], None]:
    """Returns a hook that adds the square of a weight's whole gradient to ``diagonal`` and drops the gradient."""

    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        diagonal.add_(weight.grad.to(diagonal.dtype).square())
        weight.grad = None

    return add


@contextmanager
def _differentiating(model: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Lets ``weights`` alone take a gradient inside the ``with`` block."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, required in before.items():
            parameter.requires_grad_(required)
