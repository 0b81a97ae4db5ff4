"""The latent cache against the full-width one: logits of long generations, bytes, and what else a cache must do."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cohere2Config,
    CohereConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
)

import lsp_core.latent_attention
import lsp_core.plain
from flows.demo_text import python_documents
from lsp_core.allocation import uniform_parameters
from lsp_core.basis import ordered_basis
from lsp_core.discovery import discover_units
from lsp_core.gram import gather_grams
from lsp_core.latent_cache import LatentCache
from lsp_core.latent_rows import SLACK, bytes_held
from lsp_core.merging import merge_model, removed_directions
from lsp_core.modeling import compressed as compressed_model
from lsp_core.modeling_lsp import LSPConfig, LSPForCausalLM
from lsp_core.units import weight_of
from tests.lsp_core.latent_models import (
    CONFIGS,
    SHAPE,
    assert_equal,
    compressed,
    draw,
    exact_logits,
    ordinary,
    ordinary_filled,
    randomized,
    steps,
)

LENGTH = 90
DEMO = Path(__file__).parents[2] / "flows" / "demo_model"


@pytest.mark.parametrize("keys", ["rebuilt", "rotated"])
@pytest.mark.parametrize("routing", ["auto", "input", "output", "untied"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "opt"])
def test_logits_equal_the_ordinary_cache(family, routing, keys):
    """Left padding, a prompt in two parts, then one token at a time."""
    tie = {"tie": False} if routing == "untied" else {}
    model = compressed(CONFIGS[family](), kv_routing=routing, **tie)
    ids, mask = draw(2, LENGTH, padded=4)
    cache = LatentCache(model, keys=keys)
    logits = steps(model, cache, ids, mask, prompt=(6, 11))
    expected = steps(model, ordinary(model), ids, mask, prompt=(6, 11))
    precision = torch.float64 if family == "opt" else torch.float32
    assert_equal(logits, expected, mask, precision)
    assert cache.get_seq_length() == LENGTH
    assert cache.bytes < bytes_held(ordinary_filled(model, ids, mask))


@pytest.mark.parametrize("family", ["qwen2", "olmo2", "gemma2", "gemma3"])
def test_logits_of_more_families(family):
    model = compressed(CONFIGS[family](), dtype=torch.float32)
    ids, mask = draw(2, 40, padded=4)
    cache = LatentCache(model)
    logits = steps(model, cache, ids, mask, prompt=(6, 11))
    assert_equal(logits, steps(model, ordinary(model), ids, mask, prompt=(6, 11)), mask)
    assert cache.bytes < bytes_held(ordinary_filled(model, ids, mask))


def test_biases_of_keys_and_values_count():
    """An output tie, where the bias stands beside the shared factor, and an input tie, where it is the factor's own."""
    for routing in ("output", "input"):
        model = compressed(CONFIGS["qwen2"](), dtype=torch.float32, kv_routing=routing)
        ids, mask = draw(2, 30)
        logits = steps(model, LatentCache(model), ids, mask)
        assert_equal(logits, steps(model, ordinary(model), ids, mask), mask)
        with torch.no_grad():
            model.model.model.layers[0].self_attn.v_proj.bias.zero_()
        assert (steps(model, LatentCache(model), ids, mask) - logits).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_core_between_both_sides(family):
    """K and V of both ties, y = B C z: the shared z where it is narrower than both C z, else these."""
    for rank, widths in ((20, (20, 20, True)), (6, (6, 6, False))):
        model = compressed(CONFIGS[family](), kv_routing="input")
        units = list(model.config.units)
        members = [f"model.layers.0.self_attn.{letter}_proj" for letter in "kv"]
        roles = ["key", "value"]
        units.append({"name": "kv.output", "side": "output", "members": members, "roles": roles, "rank": rank})
        qkv = next(unit for unit in units if members[0] in unit["members"])
        qkv["rank"] = 20
        config = LSPConfig(base_config=model.model.config, base_architecture=type(model.model).__name__, units=units)
        both = randomized(LSPForCausalLM(config)).double().eval()
        cache = LatentCache(both)
        block = cache.layers[0]._block
        assert (block.key.width, block.value.width, block.tied) == widths
        ids, mask = draw(2, 40, padded=3)
        assert_equal(steps(both, cache, ids, mask), steps(both, ordinary(both), ids, mask), mask)


@pytest.mark.parametrize(("dense", "latents"), [("v_proj", (True, False)), ("k_proj", (False, True))])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_a_dense_unit_is_held_whole(family, dense, latents):
    model = compressed(CONFIGS[family](), kv_routing="untied", tie=False, dense=(dense,))
    cache = LatentCache(model)
    block = cache.layers[1]._block
    assert (block.key is not None, block.value is not None) == latents
    ids, mask = draw(2, 40, padded=3)
    assert_equal(steps(model, cache, ids, mask), steps(model, ordinary(model), ids, mask), mask)


def test_a_wide_latent_is_not_held():
    """An input tie whose latent is wider than K and V together, as grouped heads have it; and one just narrower."""
    ids, mask = draw(2, 20)
    for rank, held in ((12, False), (11, True)):
        config = LlamaConfig(**SHAPE, num_key_value_heads=1, head_dim=6)
        model = compressed(config, kv_routing="input", share=(rank + 0.5) / 40)
        cache = LatentCache(model)
        assert hasattr(cache.layers[0], "_block") == held
        assert_equal(steps(model, cache, ids, mask), steps(model, ordinary(model), ids, mask), mask)
        filled = ordinary_filled(model, ids, mask)
        # beside the numbers there are the positions, four bytes a token, and the room for tokens to come
        assert cache.bytes <= (1 + 1 / SLACK) * (bytes_held(filled) + 4 * ids.numel())


def test_fused_layers_are_held_whole(caplog):
    """Phi-3 and GPT-NeoX make Q, K and V in one layer: no latent is one of K and V alone."""
    for config in (Phi3Config(**SHAPE, num_key_value_heads=2), GPTNeoXConfig(**SHAPE)):
        model = compressed(config, dtype=torch.float32)
        ids, mask = draw(2, 20, padded=2)
        cache = LatentCache(model)
        assert "held whole" in caplog.text
        caplog.clear()
        logits = steps(model, cache, ids, mask)
        assert torch.equal(logits[mask.bool()], steps(model, ordinary(model), ids, mask)[mask.bool()])


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "cohere"])
def test_parts_of_the_context(family, monkeypatch):
    """Several parts a step, for one token and for several, by the op and without it; rotations of neighbours."""
    monkeypatch.setattr(lsp_core.latent_attention, "PART_NUMBERS", 1)
    monkeypatch.setattr(lsp_core.plain, "CONTEXT_CHUNK", 7)
    used = []
    op = lsp_core.latent_attention.latent_decode_attention
    monkeypatch.setattr(
        lsp_core.latent_attention, "latent_decode_attention", lambda *a, **k: (used.append(1), op(*a, **k))[1]
    )
    model = compressed(CohereConfig(**SHAPE) if family == "cohere" else CONFIGS[family](), dtype=torch.float32)
    ids, mask = draw(2, 70, padded=4)
    prompt = (6, 45, 53)
    logits = steps(model, LatentCache(model), ids, mask, prompt=prompt)
    assert_equal(logits, steps(model, ordinary(model), ids, mask, prompt=prompt), mask)
    assert bool(used) == (family != "cohere")


def test_blocks_that_do_not_turn():
    """Blocks of full attention that are given rotary embeddings and leave them."""
    layers = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    model = compressed(Cohere2Config(**SHAPE, num_key_value_heads=4, head_dim=10, **layers), dtype=torch.float32)
    ids, mask = draw(2, 30, padded=2)
    for prompt in ((1,), (9,)):  # a first token alone stands at position 0, where a rotation does nothing
        logits = steps(model, LatentCache(model), ids, mask, prompt=prompt)
        assert_equal(logits, steps(model, ordinary(model), ids, mask, prompt=prompt), mask)


@pytest.mark.parametrize("keys", ["rebuilt", "rotated"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gemma2"])
def test_bfloat16_is_as_near_to_exact_as_the_ordinary_cache(family, keys):
    """Errors against one pass in float64, each a root mean square over all logits."""
    model = compressed(CONFIGS[family](), dtype=torch.bfloat16)
    ids, mask = draw(2, 60)
    exact = exact_logits(model, ids, mask)
    cache = LatentCache(model, keys=keys)
    ours = (steps(model, cache, ids, mask).double() - exact).norm()
    theirs = (steps(model, ordinary(model), ids, mask).double() - exact).norm()
    assert ours <= 1.25 * theirs
    assert cache.layers[0]._keys.tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_either_implementation(attention):
    model = compressed(CONFIGS["qwen3"](), dtype=torch.float32, attention=attention)
    ids, mask = draw(2, 40, padded=4)
    cache = LatentCache(model)
    assert model.model.config._attn_implementation == f"latent_{attention}"
    logits = steps(model, cache, ids, mask, prompt=(6, 12))
    assert_equal(logits, steps(model, ordinary(model), ids, mask, prompt=(6, 12)), mask)


def test_bytes_are_the_numbers_held():
    """Tied latents of 16 numbers a token and block, and one position of four bytes; the prompt leaves no room."""
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    ids, mask = draw(3, 101)
    cache = LatentCache(model)
    assert cache.bytes == 0
    for length, room in ((50, 0), (101, 1 / SLACK)):
        cache.reset()
        steps(model, cache, ids[:, :length], mask[:, :length], prompt=(50,))
        numbers = 3 * length * (2 * 16 + 1)
        assert 4 * numbers <= cache.bytes <= 4 * numbers * (1 + room)
        held = sum(layer._keys.length * layer._keys.tensor.shape[2] * 3 for layer in cache.layers)
        assert held + 3 * cache._positions.length == numbers
    rotated = LatentCache(model, keys="rotated")
    steps(model, rotated, ids, mask, prompt=(101,))
    assert rotated.bytes == 4 * 3 * 101 * 2 * (40 + 16)


def test_a_window_bounds_the_bytes():
    """Mistral with a window of 7: six tokens stay, whatever the length, after a long prompt and after many steps."""
    model = compressed(CONFIGS["mistral"](), dtype=torch.float32)
    ids, mask = draw(2, 90)
    cache = LatentCache(model)
    steps(model, cache, ids[:, :60], mask[:, :60], prompt=(60,))
    per_token = 4 * 2 * 2 * (8 + 8)
    rows = cache.bytes - 4 * cache._positions.tensor.numel()
    assert rows == 6 * per_token
    steps(model, copy.deepcopy(cache), ids[:, 60:], mask, prompt=(1,))
    logits = steps(model, ordinary(model), ids, mask, prompt=(60,))
    with torch.no_grad():
        for end in range(61, 91):
            result = model(input_ids=ids[:, end - 1 : end], past_key_values=cache, use_cache=True).logits
            assert_equal(result, logits[:, end - 1 : end], mask[:, :1])
    assert cache.bytes - 4 * cache._positions.tensor.numel() <= (6 + 1 + SLACK) * per_token


@torch.no_grad()
def demo_model(ids):
    """The demo model at -70 %, uniform ranks, merged from its whitened bases, untrained."""
    base = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    units = discover_units(base)
    removed = uniform_parameters(units, 0.7).removed
    grams = gather_grams(base, units, ids, micro_batch=4)
    vectors = {}
    for unit in units:
        weights = [weight_of(base.get_submodule(name)).detach() for name in unit.members]
        vectors[unit.name] = removed_directions(ordered_basis(unit, grams[unit.name], weights).q, removed[unit.name])
    merge_model(base, units, {name: v for name, v in vectors.items() if removed[name]})
    return compressed_model(base, units)


@pytest.mark.slow
def test_demo_model():
    """An eighth of the bytes at most, and the same logits over 512 generated tokens after 64 of held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    text = "\n".join(document.text for document in python_documents() if document.split == "test")
    tokens = torch.tensor(tokenizer(text[:100_000])["input_ids"])
    model = demo_model(tokens[: 32 * 256].view(32, 256))
    prompt = tokens[-64:][None]
    cache = LatentCache(model)
    ids = model.generate(prompt, past_key_values=cache, max_new_tokens=512, min_new_tokens=512, do_sample=False)
    assert ids.shape == (1, 576)
    assert cache.get_seq_length() == 575
    full, mask = ordinary(model), torch.ones_like(ids)
    expected = steps(model, full, ids, mask, prompt=(64,))
    again = LatentCache(model)
    assert_equal(steps(model, again, ids, mask, prompt=(64,)), expected, mask)
    chosen = expected[:, 63:-1].argmax(-1)
    assert (chosen == ids[:, 64:]).float().mean() > 0.99  # but for near ties
    print(f"\n{cache.bytes} bytes of {bytes_held(full)}: 1/{bytes_held(full) / cache.bytes:.2f}")
    assert cache.bytes <= bytes_held(full) / 8
