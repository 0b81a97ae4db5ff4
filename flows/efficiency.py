"""``python -m flows efficiency``: memory, cache and FLOPs before and after compression, from a model's config alone."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lsp_core.allocation import uniform_parameters, uniform_rank
from lsp_core.discovery import KVRouting, discover_units
from lsp_core.efficiency import efficiency as figures
from lsp_core.named_shapes import SHAPES, config_of

ALLOCATIONS = {"uniform_parameters": uniform_parameters, "uniform_rank": uniform_rank}


def efficiency(model: str, ratio: float, allocation: str, kv_routing: KVRouting, device_gib: float) -> dict[str, Any]:
    """Returns the figures of the dense and the compressed model; no weight is loaded.

    ``model``: a folder with a config, a config's JSON file, a named shape, or a hub id.
    Errors: ``ValueError`` if there is no such model, or if the ratio cannot be reached.
    """
    empty = empty_model(model)
    units = discover_units(empty, kv_routing=kv_routing)
    chosen = ALLOCATIONS[allocation](units, ratio)
    return {
        "model": model,
        "ratio": ratio,
        "realized_ratio": chosen.ratio,
        "allocation": allocation,
        "kv_routing": kv_routing,
        "device_gib": device_gib,
        "dense": asdict(figures(empty, units, {}, device_gib=device_gib)),
        "compressed": asdict(figures(empty, units, chosen.removed, device_gib=device_gib)),
    }


def empty_model(model: str) -> PreTrainedModel:
    """Returns the model on the meta device.

    Errors: ``ValueError`` if ``model`` is no folder, JSON file or hub id of a causal language model.
    """
    config = _config(model)
    try:
        with torch.device("meta"):
            empty: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(f"{model} is no causal language model: {str(error).splitlines()[0]}") from None
    return empty


def _config(model: str) -> PreTrainedConfig:
    path = Path(model).expanduser()
    if model in SHAPES or path.suffix == ".json" or path.is_dir():
        return config_of(model)
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model} is no folder with a config.json, no shape ({', '.join(SHAPES)}) and no hub id at hand: "
            f"{str(error).splitlines()[0]}"
        ) from None
