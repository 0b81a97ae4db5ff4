"""Saving a merged model and loading it back: safetensors and JSON only.

``config.json`` carries the base model's configuration under a ``model_type`` of its own, so that a loader that does not
know compressed models refuses the folder instead of filling a dense model with random weights.
"""

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from lsp_core.layers import Factor, FactoredLinear, bias_of, replace_module
from lsp_core.units import Unit, weight_of

MODEL_TYPE = "lsp"
WEIGHTS = "model.safetensors"


def save_compressed(
    model: PreTrainedModel, units: Sequence[Unit], folder: Path, *, facts: Mapping[str, Any] | None = None
) -> None:
    """Writes a merged model to ``folder``; shared factors are stored once. ``facts`` are recorded beside the units."""
    folder.mkdir(parents=True, exist_ok=True)
    factored = {name: module for name, module in model.named_modules() if isinstance(module, FactoredLinear)}
    described = [
        {"name": unit.name, "side": unit.side, "members": unit.members, "rank": layer.ranks[unit.side]}
        for unit in units
        if (layer := factored.get(unit.members[0])) is not None and unit.side in layer.sides
    ]
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [type(model).__name__],
        "base_config": model.config.to_diff_dict() | {"model_type": model.config.model_type},
        "dtype": str(model.dtype).removeprefix("torch."),
        "options": _options(model),
        "units": described,
        "facts": dict(facts or {}),
    }
    # named_parameters yields each shared factor once
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    weights |= {name: buffer.contiguous() for name, buffer in _persistent_buffers(model)}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = getattr(model, "generation_config", None)  # encoders and classifiers generate nothing
    if generation is not None:
        generation.save_pretrained(folder)


def load_compressed(folder: str | Path) -> PreTrainedModel:
    """Returns the model saved in ``folder``, in evaluation mode, with the logits it had when it was saved.

    Errors: ``ValueError`` if the folder holds no compressed model, or weights that do not fit its config.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no config.json: it is not a saved model") from None
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{folder} holds a {config.get('model_type')!r} model, not a compressed one: load it with transformers"
        )
    base = dict(config["base_config"])
    dtype = getattr(torch, config["dtype"])
    base_config = AutoConfig.for_model(base.pop("model_type"), **base)
    architecture = getattr(transformers, config["architectures"][0], None)
    if not (isinstance(architecture, type) and issubclass(architecture, PreTrainedModel)):
        raise ValueError(f"{folder} holds a {config['architectures'][0]}, which this version of transformers lacks")
    model: PreTrainedModel = architecture._from_config(base_config, dtype=dtype, **config["options"])
    _make_factored(model, config["units"])
    if not (folder / WEIGHTS).exists():
        raise ValueError(f"{folder} holds a config.json but no {WEIGHTS}: the copy is not whole")
    weights = load_file(folder / WEIGHTS)
    expected = {name: tensor.shape for name, tensor in [*model.named_parameters(), *_persistent_buffers(model)]}
    found = {name: tensor.shape for name, tensor in weights.items()}
    if expected != found:
        odd = sorted({name for name, _ in expected.items() ^ found.items()})[:5]
        raise ValueError(f"{folder / WEIGHTS} does not fit its config: {odd} are missing, too many or misshapen")
    model.load_state_dict(weights, strict=False)
    model.eval()
    return model


def _options(model: PreTrainedModel) -> dict[str, bool]:
    """Returns the arguments, beside its config, that ``model`` is built with."""
    poolable = "add_pooling_layer" in signature(type(model).__init__).parameters
    return {"add_pooling_layer": False} if poolable and getattr(model, "pooler", None) is None else {}


def _make_factored(model: nn.Module, units: Sequence[Mapping[str, Any]]) -> None:
    """Replaces the members of the described units by factored layers of the right shapes, with their shared factors."""
    shared: dict[str, dict[str, Factor]] = {}
    for unit in units:
        weight = weight_of(model.get_submodule(unit["members"][0]))
        if unit["side"] == "input":
            factor = Factor(weight.new_empty(unit["rank"], weight.shape[1]), readers=len(unit["members"]))
        else:
            factor = Factor(weight.new_empty(weight.shape[0], unit["rank"]))
        for name in unit["members"]:
            shared.setdefault(name, {})[unit["side"]] = factor
    for name, factors in shared.items():
        layer = model.get_submodule(name)
        rows, columns = weight_of(layer).shape
        rows = factors["output"].weight.shape[1] if "output" in factors else rows
        columns = factors["input"].weight.shape[0] if "input" in factors else columns
        replace_module(model, name, FactoredLinear(weight_of(layer).new_empty(rows, columns), factors, bias_of(layer)))


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    names = set(model.state_dict())
    return [(name, buffer) for name, buffer in model.named_buffers() if name in names]
