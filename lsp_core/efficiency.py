"""Analytic memory and compute of a model before and after compression, from shapes alone.

Conventions, which reproduce the paper's figures: 2 bytes a parameter, all parameters; the KV cache holds the latent of
an input-tied Q/K/V once, r_K + r_V where K and V have latents of their own, and full width where they are dense;
batch 8; 128k is 131072 tokens; the longest context leaves 6 GiB free; FLOPs are 2 (block linears + head) a token and
4 x context x attention width x blocks, the prefill counted as full attention with the head on every token. A factor
that the members of an output tie share is stored once and applied by each. Of a mixture of experts a token is counted
in its router and in as many experts as it is routed to, and all experts are weights.
Source: paper, appendix 'Inference Efficiency'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from lsp_core.decode_checks import expert_weights
from lsp_core.units import LINEAR_TYPES, Unit, find_blocks

GIB = 2**30
BYTES = 2  # a parameter, or a cached float
BATCH = 8
LONG_CONTEXT = 131_072
SHORT_CONTEXT = 2048
HEADROOM_GIB = 6.0
ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")  # kinds of layers that cache keys and values


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Analytic figures of one model; the names carry the units."""

    parameters: int
    weights_gib: float
    kv_floats_per_token_per_layer: float
    weights_plus_kv_128k_gib: float
    max_context_k_tokens: float
    prefill_tflop_2k: float
    decode_gflop_2k: float


def efficiency(
    model: PreTrainedModel, units: Sequence[Unit], removed: Mapping[str, int], *, device_gib: float = 95.5
) -> Efficiency:
    """Returns the figures of ``model``, which may be on the meta device, with ``removed`` directions of its units gone.

    ``max_context_k_tokens`` is in thousands of tokens a sequence at batch 8, 0 where the weights alone do not fit.
    Errors: ``ValueError`` of a model whose cache is no keys and values, and if directions are removed and the units'
    roles are unknown: what is cached cannot be told.
    """
    _check_attention(model)
    traced = model.config.get_text_config()._attn_implementation == "sdpa" or any(any(unit.roles) for unit in units)
    if any(removed.values()) and not traced:
        raise ValueError(
            "the trace did not tell which layers make keys and values, so the cache cannot be counted: load the model "
            "with attn_implementation='sdpa' if it supports that"
        )
    counts = [(unit, removed.get(unit.name, 0)) for unit in units]
    parameters = sum(p.numel() for p in model.parameters()) - sum(unit.saved(k) for unit, k in counts)
    blocks = len(find_blocks(model))
    kv_floats = sum(_kv_floats(model, units, removed, block) for block in range(blocks)) / blocks
    weights = BYTES * parameters
    kv_bytes_per_token = BYTES * kv_floats * blocks * BATCH
    room = (device_gib - HEADROOM_GIB) * GIB - weights
    config = model.config.get_text_config()
    attention = 4 * SHORT_CONTEXT * config.num_attention_heads * _head_width(model) * blocks  # FLOPs a token
    linear = 2 * (_linear_parameters(model) + sum(_products(unit, k) - unit.parameters for unit, k in counts))
    return Efficiency(
        parameters=parameters,
        weights_gib=weights / GIB,
        kv_floats_per_token_per_layer=kv_floats,
        weights_plus_kv_128k_gib=(weights + kv_bytes_per_token * LONG_CONTEXT) / GIB,
        max_context_k_tokens=max(0.0, room / kv_bytes_per_token / 1000),
        prefill_tflop_2k=(linear + attention) * SHORT_CONTEXT / 1e12,
        decode_gflop_2k=(linear + attention) / 1e9,
    )


def fused_members(units: Sequence[Unit], removed: Mapping[str, int]) -> list[str]:
    """Returns the names of the factored layers that make keys and values in one: one latent is counted for both.

    A ``LatentCache`` holds these keys and values whole.
    """
    return [
        name
        for unit in units
        if removed.get(unit.name, 0) > 0
        for name, role in zip(unit.members, unit.roles, strict=True)
        if {"key", "value"} <= set(role.split("+"))
    ]


def _check_attention(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENTIONS))
    if not hasattr(config, "num_attention_heads") or others:
        kinds = f" ({', '.join(others)})" if others else ""
        raise ValueError(
            f"a {type(model).__name__} has layers without attention{kinds}: memory and compute are counted for "
            "attention in every block"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"a {type(model).__name__} has multi-head latent attention, whose cache is no keys and values: memory and "
            "compute are not counted for it"
        )


def _products(unit: Unit, removed: int) -> int:
    """Returns how many multiplications the linear layers of a unit take a token."""
    if removed == 0:
        return unit.parameters
    applied = len(unit.members) if unit.side == "output" else 1  # times that the shared factor is applied
    return (unit.dimension - removed) * (applied * unit.dimension + sum(unit.others))


def _linear_parameters(model: PreTrainedModel) -> int:
    """Returns the weights, not the biases, of the head and of the linear layers inside the blocks, shared ones once.

    Of experts as many as a token is routed to.
    """
    inside = [layer for block in find_blocks(model) for layer in block.modules() if isinstance(layer, LINEAR_TYPES)]
    head: nn.Module | None = model.get_output_embeddings()
    weights = {id(layer.weight): layer.weight for layer in inside}
    count = sum(weight.numel() for weight in weights.values())
    return count + _expert_parameters(model) + (0 if head is None else head.weight.numel())  # type: ignore[operator]


def _expert_parameters(model: PreTrainedModel) -> int:
    """Returns the weights of the experts (E, ., .) that a token is multiplied by, and of the routers (E, D)."""
    experts = {id(weight): weight for block in find_blocks(model) for weight in expert_weights(block)}
    if not experts:
        return 0
    chosen: int | None = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if chosen is None:
        raise ValueError(f"a {type(model).__name__} does not say how many experts a token is routed to")
    counts = {len(weight) for weight in experts.values()}
    routers = [
        parameter
        for block in find_blocks(model)
        for module in block.modules()
        if not isinstance(module, (*LINEAR_TYPES, nn.Embedding))
        for name, parameter in module.named_parameters(recurse=False)
        if name == "weight" and parameter.dim() == 2 and len(parameter) in counts
    ]
    routed = sum(weight.numel() // len(weight) * chosen for weight in experts.values())
    return routed + sum(router.numel() for router in routers)


def _head_width(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def _kv_floats(model: PreTrainedModel, units: Sequence[Unit], removed: Mapping[str, int], block: int) -> int:
    """Returns the numbers that one block caches for one token."""
    config = model.config.get_text_config()
    full = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * _head_width(model)
    widths: dict[str, int] = {"key": full, "value": full}
    for unit in units:
        count = removed.get(unit.name, 0)
        if unit.block != block or count == 0:
            continue
        feeds = {role for role in widths for member_roles in unit.roles if role in member_roles.split("+")}
        if unit.side == "input" and feeds == set(widths):
            return unit.dimension - count  # one latent serves both
        widths |= dict.fromkeys(feeds, unit.dimension - count)
    return sum(widths.values())
