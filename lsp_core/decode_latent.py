"""A latent cache that is filled with random latents instead of a prefill."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lsp_core.latent_blocks import KeyMode
from lsp_core.latent_cache import LatentCache, LatentLayer
from lsp_core.latent_rows import Rows

REAL_TOKENS = 2  # computed: from them the rows take their widths, and the cache checks itself


@torch.no_grad()
def started_cache(model: PreTrainedModel, keys: KeyMode, batch: int) -> LatentCache:
    """Returns the cache of ``model`` after ``REAL_TOKENS`` tokens of ``batch`` sequences."""
    cache = LatentCache(model, keys=keys)
    tokens = torch.full((batch, REAL_TOKENS), 3, device=model.device)
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return cache


def bytes_per_token(cache: LatentCache) -> int:
    """Returns the bytes that ``cache`` holds of one token of every sequence of its batch."""
    held = [tensor[:, 0] for tensor, _ in _held(cache)]
    held += [whole[:, :, 0] for layer in _whole_layers(cache) for whole in _keys_and_values(layer)]
    return sum(of_token.numel() * of_token.itemsize for of_token in held)


@torch.no_grad()
def fill(cache: LatentCache, context: int) -> None:
    """Adds random numbers to a started cache until it holds ``context`` tokens, as if the model had been called.

    What it holds of a token is written where a call writes it; the positions are those of a text without padding.
    """
    count = context - REAL_TOKENS
    for tensor, rows in _held(cache):
        shape = (tensor.shape[0], count, tensor.shape[2])
        if rows is cache._positions:
            places = torch.arange(REAL_TOKENS, context, device=tensor.device, dtype=tensor.dtype)
            rows.append(places.view(1, count, 1).expand(shape))
        else:
            rows.append(torch.randn(shape, device=tensor.device, dtype=tensor.dtype))
    for layer in cache.layers:
        if isinstance(layer, LatentLayer):
            layer.seen = context
    for layer in _whole_layers(cache):
        layer.keys, layer.values = (_longer(whole, count) for whole in _keys_and_values(layer))


def _held(cache: LatentCache) -> list[tuple[Tensor, Rows]]:
    """Returns the tensors (B, room, F) that hold latents, and positions, with their rows."""
    rows = [each for layer in cache.layers if isinstance(layer, LatentLayer) for each in layer._all_rows()]
    return [(each.tensor, each) for each in (*rows, cache._positions) if each.tensor is not None]


def _whole_layers(cache: LatentCache) -> list[DynamicLayer]:
    """Returns the layers of the blocks of which nothing is factored."""
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]


def _keys_and_values(layer: DynamicLayer) -> tuple[Tensor, Tensor]:  # (B, H, T, d) each
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _longer(whole: Tensor, count: int) -> Tensor:  # (B, H, T, d) -> (B, H, T + count, d)
    more = torch.randn(*whole.shape[:2], count, whole.shape[3], device=whole.device, dtype=whole.dtype)
    return torch.cat([whole, more], dim=2)
