"""A latent cache of a model that is changed, wrapped, adapted, made ready or interrupted while the cache lives."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import Glm4Config

from lsp_core.decoding import make_ready
from lsp_core.fused import fuse
from lsp_core.latent_cache import LatentCache
from lsp_core.latent_recording import _waiting
from lsp_core.layout import lay_out
from lsp_core.modeling_lsp import LSPConfig, LSPForCausalLM
from tests.lsp_core.latent_models import CONFIGS, SHAPE, assert_equal, compressed, draw, ordinary, randomized, steps

IDS, MASK = draw(2, 24)


def model_of(family="llama", **options):
    return compressed(CONFIGS[family](), dtype=torch.float32, **options)


def apart(**options):
    """K and V with factors of their own, which ``lay_out`` lays out."""
    return model_of(kv_routing="untied", tie=False, **options)


@torch.no_grad()
def replace_memory(model):
    for parameter in model.parameters():
        old = parameter.data
        parameter.data = old.clone()
        old.fill_(torch.nan)
    return 1


@torch.no_grad()
def rest(model, cache, start=10):
    """The logits after ``start`` tokens, one at a time."""
    parts = [model(input_ids=IDS[:, t : t + 1], past_key_values=cache).logits for t in range(start, IDS.shape[1])]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("change", [lay_out, replace_memory])
def test_factors_whose_memory_changes(change):
    model = apart()
    expected = steps(model, ordinary(model), IDS, MASK)
    cache = LatentCache(model)
    steps(model, cache, IDS[:, :10], MASK[:, :10])
    assert cache.layers[0]._plain_keys is not None
    assert change(model)
    assert_equal(rest(model, cache), expected[:, 10:], MASK[:, 10:])


def test_reset_starts_over():
    """Other weights, then another dtype; and what cannot be told before the reset."""
    model = model_of("qwen3")
    cache = LatentCache(model)
    steps(model, cache, IDS, MASK)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1
    cache.reset()
    layer = cache.layers[0]
    assert (layer._checked, layer._plain_keys) == (0, None)
    assert_equal(steps(model, cache, IDS, MASK), steps(model, ordinary(model), IDS, MASK), MASK)
    model.double()
    with pytest.raises(ValueError, match=r"holds torch\.float32 on cpu and is given torch\.float64 .* reset it"):
        rest(model, cache, start=23)
    cache.reset()
    assert_equal(steps(model, cache, IDS, MASK), steps(model, ordinary(model), IDS, MASK), MASK)


def test_a_product_with_a_core_is_no_older_than_its_factors():
    model = compressed(CONFIGS["llama"](), kv_routing="input")
    members = [f"model.layers.0.self_attn.{letter}_proj" for letter in "kv"]
    unit = {"name": "kv.output", "side": "output", "members": members, "roles": ["key", "value"], "rank": 30}
    units = [*model.config.units, unit]
    config = LSPConfig(base_config=model.model.config, base_architecture=type(model.model).__name__, units=units)
    both = randomized(LSPForCausalLM(config)).double().eval()
    cache = LatentCache(both)
    steps(both, cache, IDS, MASK)
    block = cache.layers[0]._block
    assert block.key.bytes == 8 * block.key.factor.numel()
    held = sum(layer._keys.tensor.nbytes for layer in cache.layers) + cache._positions.tensor.nbytes
    assert cache.bytes == held + block.key.bytes + block.value.bytes
    for change in (both.load_state_dict, both.load_state_dict, lambda _: None):
        change({name: 1.1 * value for name, value in both.state_dict().items()})
        expected = both.model.model.layers[0].self_attn.k_proj
        exact = expected.output_factor.weight @ expected.core.weight
        assert (block.key.factor - exact).abs().max() <= 1e-12 * exact.abs().max()
    cache.reset()
    assert block.key.bytes == 0
    assert_equal(steps(both, cache, IDS, MASK), steps(both, ordinary(both), IDS, MASK), MASK)


class Adapted(nn.Linear):
    """What an adapter puts in a linear layer's place."""


def adapt(model, part):
    layer = model.model.model.layers[1].self_attn.v_proj
    factor = getattr(layer, part)
    holder, name = (factor, "linear") if hasattr(factor, "linear") else (layer, part)
    plain = getattr(holder, name)
    adapted = Adapted(plain.in_features, plain.out_features, bias=plain.bias is not None)
    adapted.weight, adapted.bias = plain.weight, plain.bias
    setattr(holder, name, adapted)


@pytest.mark.parametrize("part", ["input_factor", "output_factor"])
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_refused(part, tied):
    model = model_of() if tied else apart()
    cache = LatentCache(model)
    steps(model, cache, IDS[:, :10], MASK[:, :10])
    adapt(model, part)
    for use in (lambda: rest(model, cache), lambda: LatentCache(model)):
        with pytest.raises(ValueError, match=r"an \w+put_factor is a .*Adapted: merge the adapter first"):
            use()


def test_a_replaced_factor_is_refused():
    model = apart()
    cache = LatentCache(model)
    layer = model.model.model.layers[0].self_attn.v_proj
    layer.input_factor = copy.deepcopy(layer.input_factor)
    with pytest.raises((ValueError, RuntimeError), match=r"make it anew|did not call the factor"):
        steps(model, cache, IDS, MASK)


def test_a_wrapped_model():
    peft = pytest.importorskip("peft")
    model = model_of()
    expected = steps(model, ordinary(model), IDS, MASK)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r".*mlp\.down_proj\.output_factor"))
    assert_equal(steps(wrapped, LatentCache(wrapped), IDS, MASK), expected, MASK)
    adapted = model_of()
    adapted = peft.get_peft_model(adapted, peft.LoraConfig(r=2, target_modules=r".*v_proj\.output_factor"))
    with pytest.raises(ValueError, match="merge the adapter first"):
        LatentCache(adapted)
    merged = adapted.merge_and_unload()
    assert_equal(steps(merged, LatentCache(merged), IDS, MASK), expected, MASK)


@pytest.mark.parametrize("factor", [1.03, 0.97])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_differences_show_in_16_bits(dtype, factor):
    model = compressed(CONFIGS["llama"](), dtype=dtype)
    cache = LatentCache(model)
    steps(model, cache, IDS, MASK)
    model.model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda _module, _inputs, y: factor * y)
    cache.reset()
    with pytest.raises(ValueError, match=r"the values of block 1 .* are more than its layer's output"):
        steps(model, cache, IDS, MASK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rotation_that_a_bias_hides(dtype):
    """Neighbours rotated together, under a large key bias where they rotate least: not what the op does."""
    options = SHAPE | {"hidden_size": 128, "head_dim": 32, "attention_bias": True, "num_key_value_heads": 4}
    config = Glm4Config(**options, partial_rotary_factor=1.0)
    model = compressed(config, dtype=dtype, kv_routing="untied", tie=False)
    with torch.no_grad():
        for layer in model.model.model.layers:
            layer.self_attn.k_proj.bias.view(4, 32)[:, 24:] += 100
    cache = LatentCache(model)
    steps(model, cache, IDS[:, :4], MASK[:, :4], prompt=(2,))
    assert [layer._plain_keys for layer in cache.layers] == [None, None]


@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_a_call_that_fails_between_blocks(family):
    """At the first tokens too. The cache says so until it is reset."""
    model = model_of(family)
    expected = steps(model, ordinary(model), IDS, MASK)
    second = (model.model.model.layers if family != "opt" else model.model.model.decoder.layers)[1]

    def fail(*_):
        raise MemoryError

    for start in (0, 10):
        cache = LatentCache(model)
        if start:
            steps(model, cache, IDS[:, :start], MASK[:, :start])
        handle = second.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError), torch.no_grad():
            model(input_ids=IDS[:, start : start + 1], past_key_values=cache)
        handle.remove()
        for use in (lambda cache=cache: rest(model, cache), lambda cache=cache: cache.crop(-1)):
            with pytest.raises(ValueError, match=rf"the blocks hold \[{start}, {start + 1}\] tokens.*reset the cache"):
                use()
        cache.reset()
        assert_equal(steps(model, cache, IDS, MASK), expected, MASK)


def test_a_refused_crop_changes_nothing():
    """The first block is of full attention and could be cropped, the second has a full window."""
    config = CONFIGS["gemma3"]()
    config.layer_types = ["full_attention", "sliding_attention"]
    for dense in ((), ("v_proj", "qkv", "k_proj", "q_proj")):
        model = compressed(config, dtype=torch.float32, dense=tuple(f"layers.1.self_attn.{name}" for name in dense))
        cache = LatentCache(model)
        steps(model, cache, IDS[:, :20], MASK[:, :20])
        with pytest.raises(ValueError, match="activate_past_recording"):
            cache.crop(-2)
        assert {layer.get_seq_length() for layer in cache.layers} == {20}
        assert_equal(rest(model, cache, 20), steps(model, ordinary(model), IDS, MASK)[:, 20:], MASK[:, 20:])


@pytest.mark.parametrize(("family", "turned"), [("mistral", 7), ("llama", 24)])
def test_only_positions_that_are_held_are_turned(family, turned, monkeypatch):
    """Once a call, for one sequence where all have the same positions; the model itself turns the new ones alone."""
    model = model_of(family)
    shapes, kind = [], type(model.model.model.rotary_emb)
    forward = kind.forward

    @functools.wraps(forward)
    def seen(*args, **kwargs):
        shapes.append(kwargs["position_ids"].shape)
        return forward(*args, **kwargs)

    monkeypatch.setattr(kind, "forward", seen)
    for padded in (0, 3):
        ids, mask = draw(2, 24, padded=padded)
        steps(model, LatentCache(model), ids, mask)
        assert shapes[-1] == (2 if padded else 1, turned)
        assert len([shape for shape in shapes[-2:] if shape[1] == turned]) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("keys", ["rebuilt", "rotated"])
def test_a_fused_model(family, keys):
    """All but what makes keys and values is fused; without that option the cache says so."""
    model = model_of(family)
    expected = steps(model, ordinary(model), IDS, MASK)
    assert fuse(model, latent_cache=True)
    assert_equal(steps(model, LatentCache(model, keys=keys), IDS, MASK), expected, MASK)
    fuse(model)
    with pytest.raises(RuntimeError, match=r"fuse\(model, latent_cache=True\)"):
        steps(model, LatentCache(model, keys=keys), IDS, MASK)


@pytest.mark.parametrize("routing", ["input", "untied"])
def test_made_ready_between_two_texts(routing):
    """Text is generated on with the same cache after ``make_ready``."""
    model = model_of(kv_routing=routing, **({"tie": False} if routing == "untied" else {}))
    texts = []
    for cache in (ordinary(model), LatentCache(model)):
        text = model.generate(IDS[:1], past_key_values=cache, max_new_tokens=8, do_sample=False)
        texts.append((cache, torch.cat([text, IDS[1:]], 1)))
    make_ready(model, latent_cache=True)
    first, second = (model.generate(t, past_key_values=c, max_new_tokens=12, do_sample=False) for c, t in texts)
    assert torch.equal(first, second)
    assert first.shape == (1, 24 + 8 + 24 + 12)


def test_an_interrupted_call_leaves_nothing_to_the_next():
    """KeyboardInterrupt, after which no hook is called, between the cache's update and the attention."""
    model = model_of()
    expected = steps(model, ordinary(model), IDS, MASK)
    cache = LatentCache(model)
    steps(model, cache, IDS[:, :10], MASK[:, :10])
    layer, update = cache.layers[1], cache.layers[1].update

    def interrupted(*args):
        update(*args)
        raise KeyboardInterrupt

    layer.update = interrupted
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(input_ids=IDS[:, 10:11], past_key_values=cache)
    del layer.update
    assert len(_waiting) == 1
    record = cache._recorder._record
    with torch.no_grad():
        assert_equal(model(input_ids=IDS, use_cache=False).logits, expected, MASK)
    assert len(_waiting) == len(record.rotations) == len(record.latents) == 0
    cache.reset()
    assert_equal(steps(model, cache, IDS, MASK), expected, MASK)


def test_a_copied_model_computes_the_same():
    model = model_of()
    expected = steps(model, ordinary(model), IDS, MASK)
    cache = LatentCache(model)
    steps(model, cache, IDS, MASK)
    copied = copy.deepcopy(model)
    assert_equal(steps(copied, ordinary(copied), IDS, MASK), expected, MASK)
    assert_equal(steps(copied, LatentCache(copied), IDS, MASK), expected, MASK)
    assert_equal(steps(model, LatentCache(model), IDS, MASK), expected, MASK)
