"""From a merged model to a checkpoint, and back: safetensors, JSON and the file of the model's own classes.

``config.json`` carries the base model's configuration under a ``model_type`` of its own, so that a loader that does not
know compressed models refuses the folder instead of filling a dense model with random weights.
"""

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lsp_core.modeling_lsp import CLASSES, FactoredLinear, LSPConfig, class_name
from lsp_core.units import Unit

WEIGHTS = "model.safetensors"


@torch.no_grad()
def compressed(
    model: PreTrainedModel, units: Sequence[Unit], *, facts: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Returns the compressed model that holds ``model``, as ``merge_model`` left it; ``facts`` go into its config."""
    model.config.dtype = model.dtype
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FactoredLinear)}
    config = LSPConfig(
        base_config=model.config,
        base_architecture=type(model).__name__,
        units=[
            {
                "name": unit.name,
                "side": unit.side,
                "members": list(unit.members),
                "roles": list(unit.roles),
                "rank": layer.ranks[unit.side],
            }
            for unit in units
            if (layer := layers.get(unit.members[0])) is not None and unit.side in layer.sides
        ],
        options=_options(model),
        facts=dict(facts or {}),
        dtype=model.dtype,
    )
    with torch.device("meta"):
        whole: PreTrainedModel = CLASSES[class_name(config.base_architecture)](config)
    whole.model = model
    whole.train(model.training)
    if whole.can_generate():
        whole.generation_config = model.generation_config
    return whole


def save_compressed(
    model: PreTrainedModel, units: Sequence[Unit], folder: Path, *, facts: Mapping[str, Any] | None = None
) -> None:
    """Writes a merged model to ``folder``; shared factors are stored once. ``facts`` are recorded beside the units."""
    compressed(model, units, facts=facts).save_pretrained(folder)


def load_compressed(folder: str | Path) -> PreTrainedModel:
    """Returns the model saved in ``folder``, in evaluation mode, with the logits it had when it was saved.

    Errors: ``ValueError`` if the folder holds no compressed model, or weights that do not fit its config.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no config.json: it is not a saved model") from None
    if config.get("model_type") != LSPConfig.model_type:
        raise ValueError(
            f"{folder} holds a {config.get('model_type')!r} model, not a compressed one: load it with transformers"
        )
    if not (folder / WEIGHTS).exists() and not (folder / f"{WEIGHTS}.index.json").exists():
        raise ValueError(f"{folder} holds a config.json but no {WEIGHTS}: the copy is not whole")
    model: PreTrainedModel = CLASSES[class_name(config.get("base_architecture", ""))].from_pretrained(folder)
    return model


def _options(model: PreTrainedModel) -> dict[str, bool]:
    """Returns the arguments, beside its config, that ``model`` is built with."""
    poolable = "add_pooling_layer" in signature(type(model).__init__).parameters
    return {"add_pooling_layer": False} if poolable and getattr(model, "pooler", None) is None else {}
