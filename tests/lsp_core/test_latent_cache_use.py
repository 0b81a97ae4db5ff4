"""What is done with a latent cache: generation, copies, several at once, its end; and what it refuses."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import (
    GPTJConfig,
    GptOssConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lsp_core.latent_cache import LatentCache
from lsp_core.modeling_lsp import LSPConfig, LSPForSeq2SeqLM
from tests.lsp_core.latent_models import (
    CONFIGS,
    GROUPED,
    SHAPE,
    assert_equal,
    compressed,
    draw,
    ordinary,
    steps,
)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "opt"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_beam_groups": 1, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},  # crops what was guessed wrongly
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=lambda options: "+".join(options) or "greedy",
)
def test_generate_gives_the_same_text(family, options):
    model = compressed(CONFIGS[family](), dtype=torch.float32)
    padded = 0 if "prompt_lookup_num_tokens" in options else 3
    ids, mask = draw(1 if padded == 0 else 2, 13, padded=padded)
    texts = []
    for cache in (LatentCache(model), ordinary(model)):
        torch.manual_seed(0)
        options = {"do_sample": False} | options
        texts.append(model.generate(ids, attention_mask=mask, max_new_tokens=25, past_key_values=cache, **options))
    assert torch.equal(*texts)
    assert texts[0].shape[1] == 38


def test_two_caches_in_turn_and_none():
    """One model with two latent caches, an ordinary one and no cache, one step of each after the other."""
    model = compressed(CONFIGS["qwen3"](), dtype=torch.float32)
    ids, mask = draw(2, 24)
    other = ids.flip(1)
    expected = steps(model, ordinary(model), ids, mask), steps(model, ordinary(model), other, mask)
    caches = LatentCache(model), LatentCache(model, keys="rotated"), ordinary(model)
    with torch.no_grad():
        for t in range(ids.shape[1]):
            for cache, text, logits in zip(caches, (ids, other, ids), (*expected, expected[0]), strict=True):
                step = model(input_ids=text[:, t : t + 1], past_key_values=cache, use_cache=True).logits
                assert_equal(step, logits[:, t : t + 1], mask[:, :1])
            whole = model(input_ids=ids[:, : t + 1], use_cache=False).logits
            assert_equal(whole, expected[0][:, : t + 1], mask[:, : t + 1])


def hooks_of(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._forward_hooks_always_called)
        for module in model.modules()
    )


def test_a_deleted_cache_leaves_nothing_behind():
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    ids, mask = draw(2, 12)
    hooks = hooks_of(model)
    first, second = LatentCache(model), LatentCache(model, keys="rotated")
    steps(model, first, ids, mask)
    copied = copy.deepcopy(first)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    steps(
        model, copied, ids[:, :1], torch.ones(2, 13, dtype=torch.long), prompt=(1,)
    )  # holds on to the hooks of the first
    steps(model, second, ids, mask)
    assert model.model.config._attn_implementation == "latent_sdpa"
    del copied, second
    gc.collect()
    assert hooks_of(model) == hooks
    assert model.model.config._attn_implementation == "sdpa"
    steps(model, ordinary(model), ids, mask)


def test_nothing_of_a_call_outlives_it():
    """Latents are let go block by block, cosines and sines of the whole context when the call is over."""
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    ids, mask = draw(2, 12)
    cache = LatentCache(model)
    seen = []
    last = model.model.model.layers[1].self_attn.q_proj
    handle = last.register_forward_pre_hook(lambda *_: seen.append(len(cache._recorder._record.latents)))
    steps(model, cache, ids, mask)
    handle.remove()
    steps(model, ordinary(model), ids, mask)  # is recorded too while the cache lives
    record = cache._recorder._record
    assert set(seen) == {0}
    assert not record.latents
    assert not record.rotations
    assert record.cosine is None


def test_a_failed_call_leaves_nothing_waiting():
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    ids, mask = draw(2, 12)
    cache = LatentCache(model)
    steps(model, cache, ids, mask)
    with pytest.raises(ValueError, match=r"the cache holds \(2, 12, .* and is given \(1, 1, "), torch.no_grad():
        model(input_ids=ids[:1, :1], past_key_values=cache, use_cache=True)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_equal(steps(model, cache, ids, mask), steps(model, ordinary(model), ids, mask), mask)


@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_copies_crops_and_batches(family):
    """A padded prompt's cache copied and continued twice; cropped; its sequences repeated, selected and reordered."""
    model = compressed(CONFIGS[family](), dtype=torch.float32)
    ids, mask = draw(2, 30, padded=4)
    expected = steps(model, ordinary(model), ids, mask)
    prompt = LatentCache(model)
    steps(model, prompt, ids[:, :10], mask[:, :10], prompt=(10,))

    @torch.no_grad()
    def assert_continued(cache, order):
        text, seen = ids[order], mask[order]
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        for t in range(10, 30):
            token = {"input_ids": text[:, t : t + 1], "position_ids": positions[:, t : t + 1]}
            logits = model(**token, attention_mask=seen[:, : t + 1], past_key_values=cache).logits
            assert_equal(logits, expected[order, t : t + 1], seen[:, t : t + 1])

    for _ in range(2):
        assert_continued(copy.deepcopy(prompt), [0, 1])
    cropped = copy.deepcopy(prompt)
    cropped.activate_past_recording()
    steps(model, cropped, ids[:, :5], torch.ones_like(ids[:, :15]), prompt=(5,))
    cropped.crop(-5)
    assert cropped.get_seq_length() == 10
    assert_continued(cropped, [0, 1])
    many = copy.deepcopy(prompt)
    many.batch_repeat_interleave(2)
    assert_continued(copy.deepcopy(many), [0, 0, 1, 1])
    many.batch_select_indices(torch.tensor([2, 1, 3]))
    assert_continued(many, [1, 0, 1])
    turned = copy.deepcopy(prompt)
    turned.reorder_cache(torch.tensor([1, 0]))
    assert_continued(turned, [1, 0])


def test_a_full_window_is_cropped_only_where_the_past_was_recorded():
    model = compressed(CONFIGS["mistral"](), dtype=torch.float32)
    ids, mask = draw(1, 20)
    cache = LatentCache(model)
    steps(model, cache, ids, mask)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-2)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="is not held any more"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)


def test_inference_mode_before_and_after():
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    ids, mask = draw(2, 30)
    expected = steps(model, ordinary(model), ids, mask)
    cache = LatentCache(model)
    with torch.inference_mode():
        model(input_ids=ids[:, :10], past_key_values=cache)
        model(input_ids=ids[:, 10:12], past_key_values=cache)
    with torch.no_grad():
        result = model(input_ids=ids[:, 12:13], past_key_values=cache).logits
    assert_equal(result, expected[:, 12:13], mask[:, :1])
    result = model(input_ids=ids[:, 13:14], past_key_values=cache).logits  # with gradients: none is kept
    assert result.requires_grad
    assert not cache.layers[0]._keys.tensor.requires_grad
    assert_equal(result.detach(), expected[:, 13:14], mask[:, :1])


def test_a_compiled_model_gives_the_same():
    model = compressed(CONFIGS["qwen3"](), dtype=torch.float32)
    ids, mask = draw(2, 16, padded=2)
    expected = steps(model, ordinary(model), ids, mask)
    compiled = torch.compile(model, backend="eager")
    assert_equal(steps(compiled, LatentCache(model), ids, mask), expected, mask)


def test_refusals():
    dense = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with pytest.raises(ValueError, match="of a compressed model, an LSPForCausalLM, not of a LlamaForCausalLM"):
        LatentCache(dense)
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    with pytest.raises(ValueError, match="keys='latent': the keys of a LatentCache are 'rebuilt' or 'rotated'"):
        LatentCache(model, keys="latent")
    t5 = T5Config(vocab_size=61, d_model=40, d_kv=8, d_ff=72, num_layers=1, num_heads=4, decoder_start_token_id=0)
    encoder_decoder = LSPForSeq2SeqLM(LSPConfig(base_config=t5, base_architecture="T5ForConditionalGeneration"))
    with pytest.raises(ValueError, match="for decoders that generate, not for a T5ForConditionalGeneration"):
        LatentCache(encoder_decoder)
    ids, _ = draw(2, 8)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(ids, past_key_values=LatentCache(model), cache_implementation="static", max_new_tokens=3)


class Turner(LlamaRotaryEmbedding):
    """Rotary embeddings of a name that is not known."""


def growing():
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    model.model.model.rotary_emb.rope_type = "dynamic"
    return model


def normed_after_the_rotation():
    return compressed(HunYuanDenseV1Config(**SHAPE, head_dim=10), dtype=torch.float32)


def turned_elsewhere():
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    model.model.model.rotary_emb = Turner(model.model.config)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (growing, "their rotary frequencies depend on the length so far"),
        (normed_after_the_rotation, "in steps that are not known here"),
        (turned_elsewhere, "come from no module whose name ends in RotaryEmbedding"),
    ],
)
def test_keys_that_cannot_be_rebuilt(make, reason):
    """They are named with their remedy, and the remedy works."""
    model = make()
    ids, mask = draw(2, 20, padded=3)
    expected = steps(model, ordinary(model), ids, mask)
    with pytest.raises(ValueError, match=f"the keys of block 0 .* cannot be rebuilt .*{reason}.*keys='rotated'"):
        steps(model, LatentCache(model), ids, mask)
    assert_equal(steps(model, LatentCache(model, keys="rotated"), ids, mask), expected, mask)


def test_attention_that_cannot_be_replaced():
    ids, mask = draw(2, 12)
    sinks = compressed(
        GptOssConfig(**SHAPE, **GROUPED, num_local_experts=2, num_experts_per_tok=2), dtype=torch.float32
    )
    with pytest.raises(ValueError, match="GptOssAttention asks for attention sinks"):
        steps(sinks, LatentCache(sinks, keys="rotated"), ids, mask)
    own = compressed(GPTJConfig(vocab_size=61, n_embd=40, n_layer=2, n_head=4, rotary_dim=8), dtype=torch.float32)
    with pytest.raises(ValueError, match="GPTJForCausalLM computes its attention without"):
        LatentCache(own)
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    model.model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="in place of sdpa or eager, not of 'flex_attention'"):
        LatentCache(model)
    model.model.set_attn_implementation("sdpa")
    cache = LatentCache(model)
    model.model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="without the LatentCache that it had filled"):
        steps(model, cache, ids, mask)
    del cache
    steps(model, LatentCache(model), ids, mask)  # made after that


def test_values_that_are_more_than_their_layer():
    model = compressed(CONFIGS["llama"](), dtype=torch.float32)
    ids, mask = draw(2, 12)
    cache = LatentCache(model)
    model.model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda _module, _inputs, y: 1.01 * y)
    with pytest.raises(ValueError, match=r"the values of block 1 .* are more than its layer's output"):
        steps(model, cache, ids, mask)
