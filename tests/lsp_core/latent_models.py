"""Tiny random compressed models for the tests of the latent cache."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lsp_core.discovery import discover_units
from lsp_core.modeling_lsp import LSPConfig, LSPForCausalLM

VOCABULARY = 61
FFN = 72  # the longest sum of products in the tiny models; with 10 products a block and 2 blocks:
ROUNDINGS = 10 * 2 * FFN
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 12}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=7),  # shorter than any text here
    "qwen2": lambda: Qwen2Config(**SHAPE, num_key_value_heads=2),  # biases on Q, K and V
    "qwen3": lambda: Qwen3Config(**SHAPE, **GROUPED),  # norms of each head
    "olmo2": lambda: Olmo2Config(**SHAPE),  # norms over all heads
    "gemma2": lambda: Gemma2Config(
        **SHAPE, **GROUPED, query_pre_attn_scalar=12, sliding_window=7, attn_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(  # two rotary embeddings
        **SHAPE,
        **GROUPED,
        query_pre_attn_scalar=12,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "opt": lambda: OPTConfig(
        **{k: v for k, v in SHAPE.items() if k != "intermediate_size"},
        ffn_dim=FFN,
        word_embed_proj_dim=40,
        max_position_embeddings=128,
    ),
}


@torch.no_grad()
def compressed(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float64,
    share: float = 0.4,
    dense: tuple[str, ...] = (),
    attention: str | None = None,
    **discovery: Any,
) -> LSPForCausalLM:
    """Returns a random model whose units keep ``share`` of their directions; members of units in ``dense`` stay."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    units = [
        {
            "name": unit.name,
            "side": unit.side,
            "members": list(unit.members),
            "roles": list(unit.roles),
            "rank": int(share * unit.dimension),
        }
        for unit in discover_units(base, **discovery)
        if not any(word in unit.name for word in dense)
    ]
    model = LSPForCausalLM(LSPConfig(base_config=base.config, base_architecture=type(base).__name__, units=units))
    return randomized(model).to(dtype).eval()


@torch.no_grad()
def randomized(model: LSPForCausalLM) -> LSPForCausalLM:
    """Fills all weights, so that every layer, bias and norm matters."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.copy_(0.25 * torch.randn(parameter.shape))
        elif "norm" in name and not name.endswith("bias"):
            parameter.add_(0.1 * torch.randn(parameter.shape))
        else:
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model


def draw(batch: int, length: int, *, padded: int = 0) -> tuple[Tensor, Tensor]:
    """Returns token ids (B, T) and their mask; the first sequence begins with ``padded`` tokens of padding."""
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :padded] = mask[0, :padded] = 0
    return ids, mask


@torch.no_grad()
def steps(model: LSPForCausalLM, cache: Cache, ids: Tensor, mask: Tensor, prompt: tuple[int, ...] = (9,)) -> Tensor:
    """Returns the logits (B, T, V) of the given tokens: ``prompt`` parts first, then one token at a time."""
    ends = [*prompt, *range(prompt[-1] + 1, ids.shape[1] + 1)]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = {"input_ids": ids[:, start:end], "position_ids": positions[:, start:end]}
        result = model(**part, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        logits.append(result.logits)
    return torch.cat(logits, 1)


@torch.no_grad()
def exact_logits(model: LSPForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Returns the logits of one pass in float64 without any cache."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    exact = copy.deepcopy(model).double()
    return exact(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def ordinary(model: LSPForCausalLM) -> DynamicCache:
    return DynamicCache(config=model.model.config)


def ordinary_filled(model: LSPForCausalLM, ids: Tensor, mask: Tensor) -> DynamicCache:
    cache = ordinary(model)
    steps(model, cache, ids, mask)
    return cache


def assert_equal(logits: Tensor, expected: Tensor, mask: Tensor, precision: torch.dtype = torch.float32) -> None:
    """Norms compute in float32 whatever the dtype: so much can be asked of float64 too."""
    real = mask.bool()
    allowed = ROUNDINGS * torch.finfo(precision).eps * expected[real].abs().max()
    assert (logits - expected)[real].abs().max() <= allowed
