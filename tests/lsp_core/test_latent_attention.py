"""Attention over latents against a softmax over finished keys and values in float64, one head at a time."""

import itertools

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from lsp_core.latent_attention import Held, KeyMaker, absorb, attend, attend_held, expand, kept_positions, refusal

B, H, GROUPS, D, LENGTH, RANK = 2, 6, 2, 10, 23, 7
SUM = LENGTH + D + RANK  # the terms of the longest chain of sums
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def softmax_attention(query, keys, values, mask, scale, softcap=None):
    """Every head, sequence and query by itself; (B, H, n, d), (B, any groups, T, d) -> (B, H, n, d_v)."""
    result = torch.zeros(*query.shape[:3], values.shape[-1], dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, query.shape[:3])):
        key = keys[b, h // (H // keys.shape[1])]
        scores = key @ query[b, h, i] * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if mask is not None:
            row = mask.expand(B, H, -1, -1)[b, h, i]
            scores = scores.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else scores + row
        if scores.max() > -torch.inf:
            result[b, h, i] = scores.softmax(0) @ values[b, h // (H // values.shape[1])]
    return result


def causal(n, *, padded=3):
    """The mask (B, 1, n, T) of the last n of T positions; the first sequence begins with padding."""
    mask = (torch.arange(LENGTH) <= torch.arange(LENGTH - n, LENGTH)[:, None]).repeat(B, 1, 1, 1)
    mask[0, ..., :padded] = False
    return mask


def close(result, expected, dtype, scale=1.0):
    allowed = scale * SUM * torch.finfo(dtype).eps * expected.abs().max()
    assert result.dtype == dtype
    assert (result.double() - expected).abs().max() <= allowed


@pytest.mark.parametrize("part", [1, 5, LENGTH, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [(GROUPS, 1), (1, 3), (6, 2)])
def test_attention_in_parts(groups, dtype, part):
    for n, softcap, kind in itertools.product((1, 4), (None, 2.0), ("none", "bool", "added", "heads")):
        query, keys, values = draw(B, H, n, D), draw(B, groups[0], LENGTH, D), draw(B, groups[1], LENGTH, RANK)
        query, keys, values = (x.to(dtype) for x in (query, keys, values))
        mask = {
            "none": None,
            "bool": causal(n),
            "added": torch.zeros(B, 1, n, LENGTH, dtype=dtype).masked_fill(~causal(n), torch.finfo(dtype).min),
            "heads": draw(1, H, n, LENGTH).to(dtype),
        }[kind]
        result = attend(
            query,
            lambda start, stop, keys=keys: keys[:, :, start:stop],
            lambda start, stop, values=values: values[:, :, start:stop],
            LENGTH,
            mask=mask,
            scale=0.3,
            softcap=softcap,
            part=part,
        )
        exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
        expected = softmax_attention(query.double(), keys.double(), values.double(), exact, 0.3, softcap)
        close(result, expected, dtype)


def test_a_query_that_sees_nothing_gets_zeros():
    query, keys, values = draw(B, H, 2, D), draw(B, GROUPS, LENGTH, D), draw(B, GROUPS, LENGTH, RANK)
    mask = causal(2)
    mask[1, :, 0] = False
    for part in (4, None):
        result = attend(
            query, lambda a, b: keys[:, :, a:b], lambda a, b: values[:, :, a:b], LENGTH, mask=mask, scale=1.0, part=part
        )
        assert result[1, :, 0].abs().max() == 0
        assert result.isfinite().all()


def test_absorbed_queries_and_expanded_values():
    query, latent, factor = draw(B, H, 3, D), draw(B, LENGTH, RANK), draw(GROUPS * D, RANK)
    keys = (latent @ factor.T).unflatten(-1, (GROUPS, D)).transpose(1, 2)
    scores = query.unflatten(1, (GROUPS, -1)) @ keys.unsqueeze(2).mT
    absorbed = absorb(query, factor, GROUPS) @ latent.unsqueeze(1).mT
    close(absorbed, scores.flatten(1, 2), torch.float64)
    aggregated, bias = draw(B, H, 3, RANK), draw(GROUPS * D)
    for added in (None, bias):
        result = expand(aggregated, factor, added, GROUPS)
        for h in range(H):
            rows = slice(h // 3 * D, (h // 3 + 1) * D)
            expected = aggregated[:, h] @ factor[rows].T + (0 if added is None else added[rows])
            close(result[:, h], expected, torch.float64)


def normed(kind, width):
    torch.manual_seed(3)
    norm = {"qwen3": Qwen3RMSNorm(width, eps=1e-2), "gemma3": Gemma3RMSNorm(width, eps=1e-2)}[kind].double()
    norm.weight.data.normal_()
    return norm


def makers():
    """Yields makers of every kind, whether the op makes the same keys, and the cosine and sine that they take."""
    factor, bias = draw(GROUPS * D, RANK), draw(GROUPS * D)
    angles = draw(B, LENGTH, D // 2)
    full = tuple(torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    partial = tuple(torch.cat([part[..., :3]] * 2, -1) for part in (angles.cos(), angles.sin()))
    norms = {"no norm": None, "qwen3": normed("qwen3", D), "gemma3": normed("gemma3", D)}
    for (name, norm), turn, offset in itertools.product(norms.items(), (None, full, partial), (None, bias)):
        maker = KeyMaker(factor=factor, bias=offset, heads=GROUPS, norm=norm, rotate=apply_rotary_pos_emb)
        yield name, maker, turn, True
    for norm in (normed("qwen3", GROUPS * D), nn.LayerNorm(D, eps=1e-2).double()):
        yield (
            "other",
            KeyMaker(factor=factor, bias=bias, heads=GROUPS, norm=norm, rotate=apply_rotary_pos_emb),
            full,
            False,
        )

    def neighbours(query, key, cosine, sine):
        turned = torch.stack([-key[..., 1::2], key[..., ::2]], -1).flatten(-2)
        return query, key * cosine[:, None] + turned * sine[:, None]

    yield "neighbours", KeyMaker(factor=factor, bias=bias, heads=GROUPS, rotate=neighbours), full, False


def keys_one_by_one(maker, latent, turn):
    """(B, T, R) -> (B, H_kv, T, d): each position by itself."""
    keys = torch.zeros(B, GROUPS, LENGTH, D, dtype=torch.float64)
    for b, t in itertools.product(range(B), range(LENGTH)):
        key = maker.factor @ latent[b, t] + (0 if maker.bias is None else maker.bias)
        if maker.norm is not None and maker.norm.weight.numel() == len(key):
            key = maker.norm(key)
        key = key.view(GROUPS, D)
        if maker.norm is not None and maker.norm.weight.numel() == D:
            key = maker.norm(key)
        if turn is not None:
            width = turn[0].shape[-1]
            at = [part[b : b + 1, t : t + 1] for part in turn]
            turned = maker.rotate(key[None, :, None, :width], key[None, :, None, :width], *at)[1]
            key = torch.cat([turned[0, :, 0], key[:, width:]], -1)
        keys[b, :, t] = key
    return keys


def test_keys_are_made_as_the_attention_makes_them():
    latent = draw(B, LENGTH, RANK)
    for name, maker, turn, plain_fits in makers():
        expected = keys_one_by_one(maker, latent, turn)
        # the norms of transformers compute in float32
        precision = torch.float32 if maker.norm is not None else torch.float64
        close(maker(latent, turn).to(precision), expected, precision)
        plain = maker.plain()
        made = None if plain is None else plain(maker, latent, turn)
        same = made is not None and (made - expected).norm() <= 1e-5 * expected.norm()
        assert same == plain_fits, name


@pytest.mark.parametrize("n", [1, 3])
def test_attention_over_what_is_held(n):
    """Every maker or finished keys, latents or whole values: the op that decodes and the parts give the same."""
    latent, value_latent = draw(B, LENGTH, RANK), draw(B, LENGTH, 5)
    value_factor, value_bias = draw(GROUPS * 4, 5), draw(GROUPS * 4)
    whole_values = (value_latent @ value_factor.T + value_bias).unflatten(-1, (GROUPS, 4)).transpose(1, 2)
    query, finished = draw(B, H, n, D), draw(B, LENGTH, GROUPS * D)
    cases = [(maker, turn, plain) for _, maker, turn, plain in makers()] + [(None, None, False)]
    for (maker, turn, plain), latents, softcap in itertools.product(cases, (True, False), (None, 3.0)):
        keys = finished.unflatten(-1, (GROUPS, D)).transpose(1, 2) if maker is None else maker(latent, turn)
        for mask in (None, causal(n), causal(n)[1:], torch.where(causal(n), 0.0, -1e30).double()):
            held = Held(
                heads=GROUPS,
                keys=finished if maker is None else latent,
                key_maker=maker,
                turn=turn,
                plain_keys=maker.plain() if plain else None,
                values=value_latent if latents else whole_values.transpose(1, 2).flatten(2),
                value_factor=value_factor if latents else None,
                value_bias=value_bias if latents else None,
            )
            result = attend_held(query, held, mask=mask, scale=0.2, softcap=softcap)
            expected = softmax_attention(query, keys, whole_values, mask, 0.2, softcap)
            precision = torch.float32 if maker is not None and maker.norm is not None else torch.float64
            close(result.to(precision), expected, precision, scale=10 if precision == torch.float32 else 1)


def test_masks_of_one_query():
    assert kept_positions(None, 2) == (True, None)
    fits, keep = kept_positions(causal(1), B)
    assert fits
    assert torch.equal(keep, causal(1)[:, 0, 0])
    fits, keep = kept_positions(causal(1)[:1], B)
    assert fits
    assert keep.shape == (B, LENGTH)
    assert kept_positions(causal(1).expand(-1, H, -1, -1), B) == (False, None)
    assert kept_positions(causal(1).double(), B) == (False, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"s_aux": torch.ones(2)}, "attention sinks"),
        ({"position_bias": torch.ones(2)}, "a position bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"output_attentions": True}, "probabilities"),
    ],
)
def test_arguments_that_are_refused(arguments, reason):
    assert reason in refusal(arguments)
    assert refusal({"dropout": 0.0, "scaling": 0.1, "softcap": 3.0, "sliding_window": 7, "s_aux": None}) is None


def test_float16_does_not_overflow():
    """Scores beyond 65504 before they are scaled, and sums of values beyond it before they are normalized."""
    query, keys, values = draw(B, H, 3, 64) * 100, draw(B, GROUPS, 2000, 64) * 100, draw(B, GROUPS, 2000, RANK) + 100
    query[..., 0, :] = 0  # sees all alike
    query, keys, values = query.half(), keys.half(), values.half()
    assert (query.double().unflatten(1, (GROUPS, -1)) @ keys.double().unsqueeze(2).mT).abs().max() > 65504
    result = attend(
        query,
        lambda start, stop: keys[:, :, start:stop],
        lambda start, stop: values[:, :, start:stop],
        2000,
        mask=None,
        scale=2.0**-10 * 0.7,
    )
    expected = softmax_attention(query.double(), keys.double(), values.double(), None, 2.0**-10 * 0.7)
    sums = 64 * torch.finfo(torch.float16).eps  # of what a score, at most 64 here, is off by
    assert (result - expected).abs().max() <= (2 * sums * 5) + torch.finfo(torch.float16).eps * 105
