"""Compressed models of the contract's families, in memory and in folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lsp_core.merging import merge_model
from lsp_core.modeling import compressed
from lsp_core.modeling_lsp import FactoredLinear
from tests.contract.cases import Case, prepare

AUTO = {
    "llama": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "qwen3": "AutoModelForCausalLM",
    "opt": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "bert": "AutoModel",
}


def merged(family: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Case]:
    """Returns a merged base model, as ``merge_model`` leaves it, in evaluation mode."""
    case = prepare(family, dtype)
    model = case.copy_model()
    merge_model(model, case.units, case.perturbed())
    return model, case


def product(family: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Case]:
    """Returns the compressed model around ``merged``."""
    model, case = merged(family, dtype)
    return compressed(model, case.units, facts={"ratio": 0.5}), case


def save(folder: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[PreTrainedModel, Case]:
    """Saves the product to ``folder``; returns it."""
    model, case = product(family, dtype)
    model.save_pretrained(folder, **options)
    return model, case


def trainable(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model with gradients for its factors and for nothing else."""
    model.requires_grad_(False)
    for layer in factored_layers(model).values():
        layer.requires_grad_(True)
    return model


def factored_layers(model: nn.Module) -> dict[str, FactoredLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, FactoredLinear)}


def factors(model: nn.Module) -> list[nn.Module]:
    """Returns every factor, a shared one once."""
    found = [
        factor
        for layer in factored_layers(model).values()
        for factor in (layer.input_factor, layer.core, layer.output_factor)
        if factor is not None
    ]
    return list({id(factor): factor for factor in found}.values())


def outputs(case: Case, call: Callable[..., Any], model: PreTrainedModel) -> Tensor:
    """Returns the logits, or the last hidden state of a model without a head, that ``call`` makes of the examples."""
    with torch.no_grad():
        result = call(**case.inputs.arguments(case.examples, model))
    found: Tensor = result.last_hidden_state if case.family.kind == "encoder" else result.logits
    return found
