"""Prepared cases of the contract: a random model of each family and dtype, its units and bases; made once a session."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lsp_core.basis import ordered_basis
from lsp_core.discovery import discover
from lsp_core.gram import gather_grams
from lsp_core.inputs import Inputs, inputs_of
from lsp_core.units import Unit, find_blocks, weight_of
from tests.contract.families import FAMILIES, IMAGE, LABELS, VOCABULARY, Family

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXAMPLES, LENGTH = 8, 13
MICRO_BATCH = 3  # batches of uneven sizes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dense model and what the stages before training make of it. Tests leave ``model`` as it is.

    ``bases``: the ordered basis (D, D) of each unit, float64; ``removed``: about half of the directions of each.
    """

    name: str
    family: Family
    model: PreTrainedModel
    inputs: Inputs
    examples: Tensor
    labels: Tensor | None
    units: list[Unit]
    left_alone: dict[str, str]
    bases: dict[str, Tensor]
    removed: dict[str, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def copy_model(self) -> PreTrainedModel:
        return copy.deepcopy(self.model)

    @staticmethod
    def in_float64(model: PreTrainedModel) -> PreTrainedModel:
        """Returns a copy that computes in float64; experts one after the other, for want of a grouped product."""
        exact = copy.deepcopy(model).double()
        if any(exact.get_experts_implementation().values()):
            exact.set_experts_implementation("eager")
        return exact

    def perturbed(self) -> dict[str, Tensor]:
        """Returns vectors (D, K) near the initial ones, neither orthonormal nor of unit length."""
        generator = torch.Generator().manual_seed(7)
        last = {unit.name: self.bases[unit.name][:, -self.removed[unit.name] :] for unit in self.units}
        return {n: v + 0.05 * torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in last.items()}

    @torch.no_grad()
    def outputs(self, model: PreTrainedModel, examples: Tensor | None = None) -> Tensor:
        """Returns the logits, or the last hidden state of a model without a head, of one forward pass."""
        examples = self.examples if examples is None else examples
        result = model(**self.inputs.arguments(examples, model))
        return result.last_hidden_state if self.family.kind == "encoder" else result.logits

    @torch.no_grad()
    def log_probabilities(self, model: PreTrainedModel) -> Tensor:  # -> (n, D), float64
        """Returns every distribution that the grid compares, in float64 from the last number that has a dtype.

        The head of a language model is applied in float64 to what it reads, unless it does more than W h + b; classes
        are those of the logits; features those of the last block, at the positions that are no padding.
        """
        caught: list[Tensor] = []
        if self.family.kind == "encoder":
            handle = find_blocks(model)[-1].register_forward_hook(lambda _, __, out: caught.append(first(out)))
        elif self.family.kind != "classifier" and self.family.linear_head:
            handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: caught.append(args[0]))
        else:
            handle = model.register_forward_hook(lambda _, __, out: caught.append(out.logits))
        for batch in self.examples.split(MICRO_BATCH):
            model(**self.inputs.arguments(batch, model))
        handle.remove()
        values = torch.cat(caught).double()
        if self.family.kind == "encoder":
            values = values[self.examples != 0]
        elif self.family.kind != "classifier" and self.family.linear_head:
            head = model.get_output_embeddings()
            values = values @ head.weight.double().T
            values = values if head.bias is None else values + head.bias.double()
        return values.flatten(0, -2).log_softmax(-1)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats of each row."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@torch.no_grad()
def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a random model whose layers all matter, the same numbers rounded to ``dtype``."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model: PreTrainedModel = family.auto.from_config(family.config(), dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.copy_(0.2 * torch.randn(parameter.shape))
        else:  # biases and norms away from 0 and 1
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def draw_examples(family: Family) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    if family.kind == "classifier":
        pixels = torch.randint(0, 256, (EXAMPLES, 3, IMAGE, IMAGE), generator=generator, dtype=torch.uint8)
        return pixels, torch.randint(0, LABELS, (EXAMPLES,), generator=generator)
    ids = torch.randint(3, VOCABULARY, (EXAMPLES, LENGTH), generator=generator)
    if family.kind == "encoder":
        ids[1, 9:] = ids[5, 4:] = 0  # padding
    return ids, None


@cache
def prepare(name: str, dtype: torch.dtype) -> Case:
    family = FAMILIES[name]
    model = build(name, dtype)
    statistics = {"mean": (0.5, 0.4, 0.3), "std": (0.3, 0.4, 0.5)} if family.kind == "classifier" else {}
    inputs = inputs_of(model, **statistics)
    examples, labels = draw_examples(family)
    found = discover(model)
    grams = gather_grams(model, found.units, examples, micro_batch=MICRO_BATCH, inputs=inputs)
    bases: dict[str, Tensor] = {}
    for unit in found.units:
        weights = [weight_of(model.get_submodule(member)).detach() for member in unit.members]
        bases[unit.name] = ordered_basis(unit, grams[unit.name], weights).q
    return Case(
        name=f"{name}-{str(dtype).removeprefix('torch.')}",
        family=family,
        model=model,
        inputs=inputs,
        examples=examples,
        labels=labels,
        units=found.units,
        left_alone=found.left_alone,
        bases=bases,
        removed={unit.name: int(0.55 * unit.dimension) for unit in found.units},
    )
