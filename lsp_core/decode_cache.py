"""The full-width cache of a decode step at one context, which every step leaves as long as it found it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from lsp_core.decode_checks import check_full_attention
from lsp_core.random_models import Pool


class FixedLayer(CacheLayerMixin):
    """Keys and values (B, heads, context + 1, width); a step writes those of its token into the last place.

    All places are attended to, so no mask is needed; all shapes and addresses stay, as a CUDA graph asks for.
    """

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        return self.get_max_length() - 1

    def get_max_length(self) -> int:
        assert self.keys is not None
        return int(self.keys.shape[2])


def full_cache_shapes(config: PreTrainedConfig, batch: int, context: int) -> list[torch.Size]:
    """Returns the shapes of the keys and values of all blocks, one after the other, with room for one token more.

    Errors: ``ValueError`` if a layer keeps a window only.
    """
    text = config.get_text_config()
    check_full_attention(text)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return [torch.Size((batch, heads, context + 1, width))] * (2 * text.num_hidden_layers)


def full_cache(shapes: Sequence[torch.Size], pool: Pool) -> Cache:
    """Returns the cache of ``full_cache_shapes``, filled from ``pool``."""
    tensors = pool.take(shapes)
    return Cache(layers=[FixedLayer(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)])
