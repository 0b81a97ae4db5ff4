"""Attention over latents: keys rebuilt a part of the context at a time, values aggregated before they are expanded.

With y = B z + bias for the values, sum_t p_t y_t = B (sum_t p_t z_t) + bias, as the probabilities p sum to one: B_v is
applied once a query and head. With keys k_t = B z_t + bias and no position in them, q . k_t = (BT q) . z_t + const, and
the constant drops out of the softmax: nothing is rebuilt. Keys with rotary embeddings or a norm are rebuilt from z_t
at their positions; a running softmax goes over the parts of the context, so that they never exist all at once.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsp_core.ops import latent_decode_attention, latent_value_attention
from lsp_core.plain import grouped_product

PART_NUMBERS = 2**22  # of rebuilt keys, and of scores, that exist at a time
NORMS = ("k_norm", "k_layernorm")  # what modeling files call the norm between the key's layer and its rotation


@dataclass(frozen=True, kw_only=True)
class KeyMaker:
    """Makes keys (B, H_kv, T, d) from latents (B, T, R) as the attention does it: layer, norm, rotation.

    ``factor``: (H_kv d, R); ``norm`` is over a head or over the whole width; ``rotate`` is the modeling file's own.
    """

    factor: Tensor
    bias: Tensor | None
    heads: int
    norm: nn.Module | None = None
    rotate: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __call__(self, latent: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """``turn``: cosine and sine (B, T, d_rot) of the positions, or None where there is no rotary embedding."""
        keys: Tensor = F.linear(latent, self.factor, self.bias)
        width = keys.shape[-1]
        whole = self.norm is not None and norm_width(self.norm) == width
        if self.norm is not None and whole:
            keys = self.norm(keys)
        keys = keys.unflatten(-1, (self.heads, width // self.heads))
        if self.norm is not None and not whole:
            keys = self.norm(keys)
        keys = keys.transpose(1, 2)
        if turn is None:
            return keys
        assert self.rotate is not None
        rotated, rest = keys.split([turn[0].shape[-1], keys.shape[-1] - turn[0].shape[-1]], dim=-1)
        rotated = self.rotate(rotated[:, :0], rotated, *turn)[1]
        return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated

    def plain(self) -> "PlainKeys | None":
        """Returns the same for the op that decodes, or None where the norm is not over one head.

        Whether the rotation is in halves, as the op's, and the norm a root mean square, is for the caller to see.
        """
        weight, eps = None, 0.0
        if self.norm is not None:
            width = len(self.factor) // self.heads
            found = [getattr(self.norm, name, None) for name in ("variance_epsilon", "eps")]
            if norm_width(self.norm) != width or not any(isinstance(value, float) for value in found):
                return None
            eps = next(value for value in found if isinstance(value, float))
            weight = self.norm(self.factor.new_ones(width)).detach() * (1 + eps) ** 0.5  # some add 1 to theirs
        return PlainKeys(weight=weight, eps=eps)


@dataclass(frozen=True, kw_only=True)
class PlainKeys:
    """Keys as ``ops.latent_decode_attention`` makes them of a maker's factor: ``weight`` (d,) and eps of a norm."""

    weight: Tensor | None
    eps: float

    def __call__(self, maker: KeyMaker, latent: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns keys (B, H_kv, T, d) of ``latent`` (B, T, R), in float32 at least."""
        keys: Tensor = F.linear(latent, maker.factor, maker.bias)
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        keys = keys.unflatten(-1, (maker.heads, -1)).transpose(1, 2)
        if self.weight is not None:
            keys = keys * (keys.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
        if turn is None:
            return keys
        cosine, sine = (part[:, None] for part in turn)
        turned, rest = keys.split([cosine.shape[-1], keys.shape[-1] - cosine.shape[-1]], dim=-1)
        low, high = turned.chunk(2, dim=-1)
        return torch.cat([turned * cosine + torch.cat([-high, low], dim=-1) * sine, rest], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What is held of one block for T positions.

    ``keys``: (B, T, R) latents for the ``key_maker``, or (B, T, H_kv d) finished ones where it is None; ``turn``:
    cosine and sine (B, T, d_rot) of the positions; ``plain_keys``: what makes the same keys for the op, if anything.
    ``values``: (B, T, R_v) latents of ``value_factor`` (H_kv d, R_v), or whole ones where it is None.
    """

    heads: int
    keys: Tensor
    key_maker: KeyMaker | None
    turn: tuple[Tensor, Tensor] | None
    plain_keys: PlainKeys | None
    values: Tensor
    value_factor: Tensor | None
    value_bias: Tensor | None


def attend_held(query: Tensor, held: Held, *, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Returns the attention of new tokens over what is held, the arguments as for ``attend``: (B, H, n, d)."""
    heads, maker = held.heads, held.key_maker
    result = None
    if query.shape[2] == 1 and softcap is None and held.value_factor is not None:
        result = _of_one_token(query[:, :, 0], held, mask, scale)
    if result is None:
        query, scale = _scaled(query, scale)
        if maker is None:
            keys = partial(_part, _by_heads(held.keys, heads))
        elif held.turn is None and maker.norm is None and softcap is None:
            query = absorb(query, maker.factor, heads)
            keys = partial(_part, held.keys.unsqueeze(1))
        else:
            keys = partial(_made_part, maker, held.keys, held.turn)
        values = held.values.unsqueeze(1) if held.value_factor is not None else _by_heads(held.values, heads)
        length = held.keys.shape[1]
        result = attend(query, keys, partial(_part, values), length, mask=mask, scale=scale, softcap=softcap)
    return result if held.value_factor is None else expand(result, held.value_factor, held.value_bias, heads)


def _of_one_token(query: Tensor, held: Held, mask: Tensor | None, scale: float) -> Tensor | None:
    """Returns (B, H, 1, R_v) by the ops that decode, or None where they do not fit."""
    fits, keep = kept_positions(mask, len(query))
    plain = held.plain_keys
    if not fits or (held.key_maker is not None and plain is None):
        return None
    if plain is None or held.key_maker is None:
        keys = _by_heads(held.keys, held.heads)
        return latent_value_attention(query, keys, held.values, scale=scale, keep=keep).unsqueeze(2)
    cosine, sine = held.turn or (None, None)
    result = latent_decode_attention(
        query,
        held.keys,
        held.values,
        held.key_maker.factor.detach().unflatten(0, (held.heads, -1)),
        scale=scale,
        key_bias=None if held.key_maker.bias is None else held.key_maker.bias.detach(),
        cos=cosine,
        sin=sine,
        keep=keep,
        norm=plain.weight,
        eps=plain.eps,
    )
    return result.unsqueeze(2)


def _by_heads(rows: Tensor, heads: int) -> Tensor:  # (B, T, H_kv d) -> (B, H_kv, T, d)
    by_heads: Tensor = rows.unflatten(-1, (heads, -1))
    return by_heads.transpose(1, 2)


def _part(held: Tensor, start: int, stop: int) -> Tensor:  # (B, H_kv, T, d) -> (B, H_kv, stop - start, d)
    return held[:, :, start:stop]


def _made_part(
    maker: KeyMaker, latent: Tensor, turn: tuple[Tensor, Tensor] | None, start: int, stop: int
) -> Tensor:  # -> (B, H_kv, stop - start, d)
    turned = None if turn is None else (turn[0][:, start:stop], turn[1][:, start:stop])
    return maker(latent[:, start:stop], turned)


def key_norm_of(attention: nn.Module) -> nn.Module | None:
    """Returns the norm of the keys, or None."""
    norms = [norm for name in NORMS if isinstance(norm := getattr(attention, name, None), nn.Module)]
    return norms[0] if norms and not isinstance(norms[0], nn.Identity) else None


def norm_width(norm: nn.Module) -> int:
    weight = getattr(norm, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) else 0


def rotation_of(attention: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns the function that rotates queries and keys in the attention's own modeling file, or None."""
    return getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)


def absorb(query: Tensor, factor: Tensor, heads: int) -> Tensor:  # (B, H, n, d), (H_kv d, R) -> (B, H, n, R)
    """Returns BT q of each head."""
    return _by_head(query, factor.unflatten(0, (heads, -1)))


def expand(aggregated: Tensor, factor: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """Returns B_v (sum p z) + bias of each head: (B, H, n, R), (H_kv d, R), (H_kv d,) -> (B, H, n, d)."""
    expanded = _by_head(aggregated, factor.unflatten(0, (heads, -1)).transpose(1, 2))
    if bias is None:
        return expanded
    by_head = bias.view(heads, 1, -1).repeat_interleave(expanded.shape[1] // heads, dim=0)
    return expanded + by_head


def attend(
    query: Tensor,
    keys: Callable[[int, int], Tensor],
    values: Callable[[int, int], Tensor],
    length: int,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    part: int | None = None,
) -> Tensor:  # (B, H, n, d) -> (B, H, n, d_v)
    """Returns softmax(scale query keysT + mask) values, of a context of ``length`` positions taken in parts.

    ``keys(start, stop)``: (B, H_k, stop - start, d) and ``values``: (B, H_v, stop - start, d_v); H is a multiple of
    either number of heads. ``mask``: (B or 1, H or 1, n, length), true where a query sees a position, or numbers to
    add; a query that sees nothing gets zeros. ``softcap`` c: scores become c tanh(scores / c) before the mask.
    ``part``: positions at a time, by default as many as keep keys and scores to a few million numbers. The softmax and
    the sums of values are in float32 at least.
    """
    batch, heads, n, width = query.shape
    precise = torch.promote_types(query.dtype, torch.float32)
    query, scale = _scaled(query, scale)
    part = part or max(16, PART_NUMBERS // (batch * heads * max(n, width)))
    peak = query.new_full((batch, heads, n, 1), -torch.inf, dtype=precise)
    total = query.new_zeros((batch, heads, n, 1), dtype=precise)
    result = query.new_zeros((), dtype=precise)
    for start in range(0, length, part):
        stop = min(start + part, length)
        scores = _grouped(query, keys(start, stop).transpose(-1, -2)).to(precise) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            seen = mask[..., start:stop]
            scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        base = new_peak.masked_fill(new_peak == -torch.inf, 0)
        weights, shrink = torch.exp(scores - base), torch.exp(peak - base)
        found = values(start, stop)
        result = result * shrink + _grouped(weights, found.to(precise))
        total = total * shrink + weights.sum(-1, keepdim=True)
        peak = new_peak
    return (result / total.clamp_min(torch.finfo(precise).tiny)).to(query.dtype)


def _scaled(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Returns the query times a power of two, which rounds nothing, and what is left of the scale, at least a half.

    Scores in float16 would else leave its range before they are scaled.
    """
    power = 2.0 ** min(math.frexp(scale)[1], 0)
    return query * power, scale / power


def _grouped(x: Tensor, matrices: Tensor) -> Tensor:  # (B, H, n, a), (B, H_kv, a, b) -> (B, H, n, b)
    """Returns x M with the matrix of each head's group."""
    batch, heads, n, _ = x.shape
    groups = matrices.shape[1]
    product = grouped_product(x.reshape(batch, groups, heads // groups * n, -1), matrices)
    return product.reshape(batch, heads, n, -1)


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:  # (B, H, n, a), (H_kv, a, b) -> (B, H, n, b)
    return _grouped(x, matrices[None])


def kept_positions(mask: Tensor | None, batch: int) -> tuple[bool, Tensor | None]:  # (B or 1, 1, 1, T) -> (B, T)
    """Returns whether a mask of one query only says which positions count for all heads, and which."""
    if mask is None:
        return True, None
    if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1):
        return False, None
    return True, mask[:, 0, 0].expand(batch, -1)


def refusal(kwargs: dict[str, Any]) -> str | None:
    """Returns what attention over latents cannot do of the arguments of an attention function, or None."""
    if kwargs.get("s_aux") is not None:
        return "attention sinks"
    if kwargs.get("position_bias") is not None:
        return "a position bias"
    if kwargs.get("dropout"):
        return "dropout (put the model into evaluation mode)"
    if kwargs.get("output_attentions"):
        return "returning the attention's probabilities"
    return None
