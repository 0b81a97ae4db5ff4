"""Attention over a latent, kernels and plain torch, against float64 with every key written out."""

import pytest
import torch

pytest.importorskip("triton")

from lsp_core import ops, plain
from lsp_kernels import latent_values
from tests.kernels.draws import DEVICE, DTYPES, cut_out, integers, normal, roundoff

KERNEL_AND_PLAIN = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
# (B, H, H_kv, T, d, d_rot, R_k, R_v)
SHAPES = [
    (1, 1, 1, 1, 2, 2, 1, 1),
    (2, 6, 3, 67, 10, 10, 5, 7),
    (1, 4, 1, 131, 24, 8, 37, 131),  # a part of the columns is rotated; one key/value head
    (3, 2, 2, 300, 6, 6, 3, 17),  # several slices and blocks of the context
    (1, 3, 1, 65, 130, 34, 33, 3),  # a wide head
]


def case(shape, dtype, *, seed=0):
    """Query, latents, factor, bias, cos, sin, keep and norm weight; half the positions are kept, in runs."""
    batch, heads, own, context, width, turned, rank_k, rank_v = shape
    angle = torch.arange(context, device=DEVICE)[None, :, None] * torch.linspace(1, 0.01, turned // 2, device=DEVICE)
    angle = torch.cat([angle, angle + 0.3], -1) + torch.arange(batch, device=DEVICE)[:, None, None]
    keep = torch.ones(batch, context, dtype=torch.bool, device=DEVICE)
    keep[0, : context // 2] = False
    return {
        "query": normal(batch, heads, width, dtype=dtype, seed=seed),
        "latent_k": normal(batch, context, rank_k, dtype=dtype, seed=seed + 1),
        "latent_v": normal(batch, context, rank_v, dtype=dtype, seed=seed + 2),
        "key_factor": normal(own, width, rank_k, dtype=dtype, seed=seed + 3),
        "key_bias": normal(own * width, dtype=dtype, seed=seed + 4),
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
        "keep": keep,
        "scale": (width * rank_k) ** -0.5,
        "norm": normal(width, dtype=dtype, seed=seed + 5),
        "eps": 1e-5,
    }


def oracle_keys(latent_k, key_factor, key_bias=None, cos=None, sin=None, norm=None, eps=0.0, **_):
    """Every key in float64, (B, H_kv, T, d), position by position and head by head."""
    latent, factor = latent_k.double(), key_factor.double()
    keys = torch.einsum("btr,hdr->bhtd", latent, factor)
    if key_bias is not None:
        keys = keys + key_bias.double().view(len(factor), 1, -1)
    if norm is not None:
        keys = keys / (keys.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    if cos is not None:
        out, half = keys.clone(), cos.shape[-1] // 2
        for i in range(half):
            low, high = keys[..., i], keys[..., half + i]
            out[..., i] = low * cos[:, None, :, i].double() - high * sin[:, None, :, i].double()
            out[..., half + i] = high * cos[:, None, :, half + i].double() + low * sin[:, None, :, half + i].double()
        keys = out
    return keys


def oracle(query, keys, latent_v, scale, keep=None):
    """The attention in float64, and the largest sum that a score is rounded in."""
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scores = torch.einsum("bhd,bhtd->bht", query.double(), keys) * scale
    sums = torch.einsum("bhd,bhtd->bht", query.double().abs(), keys.abs()) * scale
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None], -torch.inf)
    return scores.softmax(-1).nan_to_num() @ latent_v.double(), sums.max().item()


def tolerance(dtype, arguments, sums):
    """Scores off by delta move the result by at most 2 delta max|v|; masses and the result are rounded to ``dtype``.

    Keys, or the query that absorbed them, are rounded to ``dtype`` too, and are sums of R_k float32 products. A norm
    weighs a key's error by the sizes that cancelled in it; 8 covers them at these seeds' condition.
    """
    terms = max(arguments["latent_k"].shape[-1], arguments["query"].shape[-1])
    delta = (8 * roundoff(dtype) + terms * 8 * roundoff(torch.float32)) * sums
    return (2 * delta + 3 * roundoff(dtype)) * arguments["latent_v"].double().abs().max().item()


def run(kernel, arguments):
    names = ["query", "latent_k", "latent_v", "key_factor", "key_bias", "cos", "sin", "keep", "scale", "norm", "eps"]
    function = ops.latent_decode_attention_kernel if kernel else plain.latent_decode_attention
    return function(*(arguments[name] for name in names))


@KERNEL_AND_PLAIN
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_everything_at_once(shape, dtype, kernel):
    arguments = case(shape, dtype)
    expected, sums = oracle(
        arguments["query"], oracle_keys(**arguments), arguments["latent_v"], arguments["scale"], arguments["keep"]
    )
    result = run(kernel, arguments)
    assert result.dtype == dtype
    assert (result - expected).abs().max() <= tolerance(dtype, arguments, sums)


@KERNEL_AND_PLAIN
@pytest.mark.parametrize("absent", ["key_bias", "cos", "keep", "norm", "norm cos", "norm cos key_bias keep"])
def test_each_part_can_be_absent(absent, kernel):
    arguments = case((2, 6, 3, 67, 10, 6, 5, 7), torch.float32)
    for name in absent.split():
        arguments |= {"cos": None, "sin": None} if name == "cos" else {name: None}
    expected, sums = oracle(
        arguments["query"], oracle_keys(**arguments), arguments["latent_v"], arguments["scale"], arguments["keep"]
    )
    assert (run(kernel, arguments) - expected).abs().max() <= tolerance(torch.float32, arguments, sums)


@KERNEL_AND_PLAIN
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1, 1), (2, 6, 3, 67, 10, 7), (1, 140, 2, 131, 67, 5), (2, 2, 2, 700, 5, 3)], ids=str
)
def test_stored_keys(shape, dtype, kernel):
    batch, heads, own, context, width, rank = shape
    query = normal(batch, heads, width, dtype=dtype, seed=1)
    keys = normal(batch, own, context, width, dtype=dtype, seed=2)
    values = normal(batch, context, rank, dtype=dtype, seed=3)
    keep = integers(batch, context, dtype=torch.float32, seed=4) >= 0
    keep[:, 0] = True
    function = ops.latent_value_attention_kernel if kernel else plain.latent_value_attention
    result = function(query, keys, values, keep, 0.3)
    expected, sums = oracle(query, keys.double(), values, 0.3, keep)
    named = {"latent_k": keys, "query": query, "latent_v": values}
    assert (result - expected).abs().max() <= tolerance(dtype, named, sums)


@KERNEL_AND_PLAIN
@pytest.mark.parametrize("stored", [False, True])
def test_what_is_not_kept_may_hold_anything(stored, kernel):
    """NaN in unwritten places of a cache; a sequence without any kept position gets zeros."""
    arguments = case((3, 2, 1, 150, 4, 4, 3, 5), torch.float32)
    keep = arguments["keep"]
    keep[1] = False
    keep[2, 70:] = False
    clean, _ = oracle(arguments["query"], oracle_keys(**arguments), arguments["latent_v"], arguments["scale"], keep)
    keys = oracle_keys(**arguments).float()
    for name in ("latent_k", "latent_v"):
        arguments[name] = arguments[name].masked_fill(~keep[..., None], torch.nan)
    if stored:
        function = ops.latent_value_attention_kernel if kernel else plain.latent_value_attention
        keys = keys.masked_fill(~keep[:, None, :, None], torch.nan)
        result = function(arguments["query"], cut_out(keys), arguments["latent_v"], keep, arguments["scale"])
    else:
        result = run(kernel, arguments)
    assert (result[1] == 0).all()
    torch.testing.assert_close(result.double(), clean, rtol=1e-4, atol=1e-5)


@KERNEL_AND_PLAIN
def test_cache_that_is_cut_out_of_a_longer_one(kernel):
    """Parts of a static cache, a latent that K and V share, one rotation for all sequences."""
    arguments = case((2, 4, 2, 80, 6, 6, 5, 5), torch.float32)
    arguments["latent_k"] = arguments["latent_v"] = cut_out(arguments["latent_k"])
    arguments["cos"], arguments["sin"] = (arguments[name][:1].expand(2, -1, -1) for name in ("cos", "sin"))
    expected, sums = oracle(
        arguments["query"], oracle_keys(**arguments), arguments["latent_v"], arguments["scale"], arguments["keep"]
    )
    assert (run(kernel, arguments) - expected).abs().max() <= tolerance(torch.float32, arguments, sums)


@KERNEL_AND_PLAIN
def test_large_scores_do_not_overflow(kernel):
    arguments = case((1, 2, 1, 140, 4, 4, 3, 5), torch.float32) | {"norm": None, "scale": 1e4, "keep": None}
    result = run(kernel, arguments)
    expected, _ = oracle(arguments["query"], oracle_keys(**arguments), arguments["latent_v"], 1e4)
    assert (result - expected).abs().max() <= 0.02  # float32 holds a score of 1e4 to 1e-3, and the mass to as much


def test_plain_rebuilds_a_chunk_at_a_time(monkeypatch):
    arguments = case((2, 4, 2, 301, 6, 6, 5, 7), torch.float64)
    whole = run(False, arguments)
    sizes, linear = [], plain.F.linear
    monkeypatch.setattr(plain, "CONTEXT_CHUNK", 64)
    monkeypatch.setattr(plain.F, "linear", lambda x, *rest: sizes.append(x.shape[1]) or linear(x, *rest))
    torch.testing.assert_close(run(False, arguments), whole, rtol=1e-12, atol=1e-12)
    assert sizes == [64, 64, 64, 64, 45]
    sizes.clear()
    arguments["keep"][:, 64:] = False
    arguments["keep"][:, 0] = True
    run(False, arguments)
    assert len(sizes) == (1 if DEVICE.type == "cpu" else 5)  # reading what is kept would stall a GPU


def test_context_is_split(monkeypatch):
    """Slices of one block and of several give the same result."""
    arguments = case((1, 3, 1, 300, 6, 6, 5, 7), torch.float32)
    whole = run(True, arguments)
    monkeypatch.setattr(latent_values, "MIN_SLICE", 64)
    torch.testing.assert_close(run(True, arguments), whole, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(latent_values, "MAX_SLICES", 1)
    torch.testing.assert_close(run(True, arguments), whole, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_fit_are_an_error():
    arguments = case((1, 3, 1, 4, 4, 4, 3, 5), torch.float32)
    factor = arguments["key_factor"].expand(2, -1, -1)
    with pytest.raises(ValueError, match="3 query heads for 2 key/value heads"):
        ops.latent_decode_attention(arguments["query"], arguments["latent_k"], arguments["latent_v"], factor, scale=1.0)
    keys = torch.zeros(1, 2, 4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        ops.latent_value_attention(arguments["query"], keys, arguments["latent_v"], scale=1.0)


@KERNEL_AND_PLAIN
@pytest.mark.parametrize("empty", ["sequences", "context", "values"])
def test_nothing_to_attend_to(empty, kernel):
    sizes = {"sequences": 2, "context": 5, "values": 3} | {empty: 0}
    batch, context, rank = sizes.values()
    arguments = case((2, 4, 2, context, 6, 4, 5, rank), torch.float32)
    for name in ("query", "latent_k", "latent_v", "cos", "sin", "keep"):
        arguments[name] = arguments[name][:batch]
    stored = ops.latent_value_attention_kernel if kernel else plain.latent_value_attention
    keys = torch.ones(batch, 2, context, 6, device=DEVICE)
    for result in (run(kernel, arguments), stored(arguments["query"], keys, arguments["latent_v"], None, 0.1)):
        assert result.shape == (batch, 4, rank)
        assert (result == 0).all()


def test_more_rows_than_a_grid_has(monkeypatch):
    arguments = case((2, 4, 2, 9, 6, 4, 5, 3), torch.float32)
    whole = run(True, arguments)
    monkeypatch.setattr(latent_values, "MAX_ROWS", 7)
    monkeypatch.setattr(latent_values, "aggregate", None)
    torch.testing.assert_close(run(True, arguments), whole, rtol=1e-5, atol=1e-6)
    keys = torch.ones(2, 2, 9, 6, device=DEVICE)
    ops.latent_value_attention_kernel(arguments["query"], keys, arguments["latent_v"], None, 0.1)


WRONG = [
    ("query", lambda t: t[0], r"query has the shape \(4, 6\)"),
    ("latent_k", lambda t: t[:1], r"latent_k has the shape \(1, 9, 5\), but must have \(2, any, any\)"),
    ("latent_v", lambda t: t[:, 1:], r"latent_v has the shape \(2, 8, 3\), but must have \(2, 9, any\)"),
    ("key_factor", lambda t: t[..., 1:], r"key_factor has the shape \(2, 6, 4\), but must have \(2, 6, 5\)"),
    ("key_bias", lambda t: t[1:], r"key_bias .*\(12\)"),
    ("cos", lambda t: t[:, 1:], r"cos .*\(2, 9, 4\)"),
    ("sin", lambda t: t[..., 1:], r"sin .*\(2, 9, 4\)"),
    ("keep", lambda t: t[:, 1:], r"keep .*\(2, 9\)"),
    ("norm", lambda t: t[1:], r"norm .*\(6\)"),
    ("norm", lambda t: t.to("meta"), r"norm is on meta, but must be on"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{name}{n}" for n, (name, *_) in enumerate(WRONG)])
def test_shapes_and_devices_that_do_not_fit(name, change, message):
    """Before a kernel reads beyond them."""
    arguments = case((2, 4, 2, 9, 6, 4, 5, 3), torch.float32)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        ops.latent_decode_attention(**arguments)


def test_a_rotation_of_more_than_the_head():
    arguments = case((2, 4, 2, 9, 6, 4, 5, 3), torch.float32)
    for turned in (3, 8):
        turn = torch.ones(2, 9, turned, device=DEVICE)
        with pytest.raises(ValueError, match=f"rotate {turned} columns of 6 in two halves"):
            ops.latent_decode_attention(**arguments | {"cos": turn, "sin": turn})


def test_shapes_of_the_other_ops_that_do_not_fit():
    def ones(*shape):
        return torch.ones(shape, device=DEVICE)

    for call, message in (
        (lambda: ops.latent_value_attention(ones(1, 2, 4), ones(1, 1, 5, 4), ones(1, 9, 3), scale=1), r"\(1, 5, any\)"),
        (lambda: ops.latent_value_attention(ones(1, 2, 4), ones(1, 1, 5, 3), ones(1, 5, 3), scale=1), r"keys has"),
        (lambda: ops.low_rank_linear(ones(1, 4), ones(2, 5), [ones(3, 2)]), r"a has the shape \(2, 5\)"),
        (lambda: ops.low_rank_linear(ones(1, 4), ones(2, 4), [ones(3, 7)]), r"bs\[0\] .*\(any, 2\)"),
        (lambda: ops.low_rank_linear(ones(1, 4), ones(2, 4), [ones(3, 2)], [ones(4)]), r"biases\[0\] .*\(3\)"),
        (lambda: ops.project(ones(3, 4), ones(5, 2), [ones(2)]), r"u has .*\(4, any\)"),
        (lambda: ops.project(ones(3, 4), ones(4, 2), [ones(3)]), r"scales\[0\] has .*\(2\)"),
        (lambda: ops.softmax_statistics(ones(3, 4), ones(7, 5), None, 4), r"weight has .*\(any, 4\)"),
        (lambda: ops.log_partition(ones(3, 4), ones(7, 4), ones(6), 4), r"bias has .*\(7\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
