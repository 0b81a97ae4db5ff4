"""Shapes of models by name, for figures that do not depend on the weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import AutoConfig, LlamaConfig, OPTConfig, PreTrainedConfig, Qwen3Config


def _llama(hidden: int, intermediate: int, blocks: int, heads: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )


def _qwen3_4b() -> Qwen3Config:
    return Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama-810m": lambda: _llama(2048, 5504, 16, 16, 4096),
    "llama-2-7b": lambda: _llama(4096, 11_008, 32, 32, 32_000),
    "llama-2-13b": lambda: _llama(5120, 13_824, 40, 40, 32_000),
    "qwen3-4b": _qwen3_4b,
    "opt-125m": OPTConfig,
}


def config_of(model: str) -> PreTrainedConfig:
    """Returns the config of a named shape, of a folder with a config.json, or of a config's JSON file.

    Errors: ``ValueError`` if ``model`` is none of them.
    """
    if model in SHAPES:
        return SHAPES[model]()
    path = Path(model).expanduser()
    if path.suffix == ".json":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{model} cannot be read: {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{model} is not JSON: {error}") from None
        kind = values.pop("model_type", None) if isinstance(values, dict) else None
        if kind is None:
            raise ValueError(f"{model} is no model config: it has no model_type")
        return _known(model, lambda: AutoConfig.for_model(kind, **values))
    if not (path / "config.json").is_file():
        raise ValueError(f"{model} is no folder with a config.json and no shape; the shapes are {', '.join(SHAPES)}")
    return _known(model, lambda: AutoConfig.from_pretrained(path))


def _known(model: str, make: Callable[[], PreTrainedConfig]) -> PreTrainedConfig:
    try:
        return make()
    except Exception as error:  # of many kinds: transformers, hub and JSON
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{model} is no config of a model that transformers knows: {reason}") from None
