"""A decode step computes what the model computes, and what is reported of it is what was measured."""

import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    GPTJConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
)

from lsp_core import decode_cell, decode_variants
from lsp_core.decode_benchmark import decode
from lsp_core.decode_cache import FixedLayer, full_cache, full_cache_shapes
from lsp_core.decode_checks import check_decoder, check_positions
from lsp_core.decode_latent import bytes_per_token, fill, started_cache
from lsp_core.decode_report import speedups, spread, table
from lsp_core.decode_settings import DecodeSettings
from lsp_core.decode_step import MASKLESS, DecodeStep, copy_bandwidth, timed_rounds
from lsp_core.decode_variants import give_weights, variants_of
from lsp_core.fused import fuse
from lsp_core.modeling_lsp import FactoredLinear, LSPConfig, Shared
from lsp_core.random_models import Pool, dense_model, described_units, materialize, pooled_shapes, tied_model

LLAMA = LlamaConfig(
    hidden_size=24,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=37,
)
OPT = OPTConfig(
    hidden_size=24,
    ffn_dim=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=24,
    vocab_size=37,
    max_position_embeddings=64,
)


def ready(config: PreTrainedConfig, make: Callable[[PreTrainedConfig], object] = dense_model) -> object:
    model = make(config)
    pool = Pool(Pool.bytes_for(pooled_shapes(model), torch.float64), torch.float64, "cpu", scale=0.2)
    return materialize(model, pool, torch.float64, "cpu")


@torch.no_grad()
@pytest.mark.parametrize("config", [LLAMA, OPT])
@pytest.mark.parametrize("attention", ["sdpa", MASKLESS])
def test_a_step_gives_the_logits_of_a_forward_pass(config: PreTrainedConfig, attention: str) -> None:
    model = ready(config)
    tokens = torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=tokens).logits[:, -1]
    prefilled = DynamicCache()
    model(input_ids=tokens[:, :-1], past_key_values=prefilled)
    shapes = full_cache_shapes(config, 2, 8)
    cache = full_cache(shapes, Pool(Pool.bytes_for(shapes, torch.float64), torch.float64, "cpu"))
    for layer, filled in zip(cache.layers, prefilled.layers, strict=True):
        assert isinstance(layer, FixedLayer)
        layer.keys[:, :, :-1], layer.values[:, :, :-1] = filled.keys, filled.values
    model.set_attn_implementation(attention)
    step = DecodeStep(model, cache, 2, 8)
    for _ in range(2):  # the second finds the cache as the first did
        step._tokens.copy_(tokens[:, -1:])
        step()
        # the same sums in another order: some hundred terms of about 1
        torch.testing.assert_close(step.logits[:, -1], expected, rtol=1e-10, atol=1e-10)
        assert step._tokens.flatten().tolist() == expected.argmax(-1).tolist()


@torch.no_grad()
@pytest.mark.parametrize("keys", ["rebuilt", "rotated"])
@pytest.mark.parametrize("config", [LLAMA, OPT])
def test_a_filled_latent_cache_is_like_one_after_a_prefill(config: PreTrainedConfig, keys: str) -> None:
    model = ready(config, lambda config: tied_model(config, described_units(config, 0.5)))
    filled = started_cache(model, keys, 2)
    fill(filled, 21)
    step = DecodeStep(model, filled, 2, 21, restore=lambda: filled.crop(-1))
    step.prepare(tuned=False)
    assert bytes_per_token(filled) * 22 <= filled.bytes <= bytes_per_token(filled) * (23 + 23 // 16)
    step._tokens.fill_(5)
    step()
    first = step.logits.clone()
    step._tokens.fill_(5)
    step()
    torch.testing.assert_close(step.logits, first, rtol=0, atol=0)  # the cache is as long as it was
    real = started_cache(model, keys, 2)
    model(input_ids=torch.full((2, 19), 4), past_key_values=real)
    assert filled.get_seq_length() == real.get_seq_length() == 21
    assert bytes_per_token(filled) == bytes_per_token(real)
    positions = [cache._positions for cache in (filled, real)]
    assert positions[0].length == positions[1].length
    if positions[0].length:
        assert torch.equal(*(rows.last(rows.length) for rows in positions))


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a CUDA graph needs one")
@pytest.mark.parametrize("make", ["dense", "tied", "fused"])
def test_a_captured_step_gives_the_logits_of_an_eager_one(make: str) -> None:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = dense_model(config) if make == "dense" else tied_model(config, described_units(config, 0.5))
    materialize(
        model, Pool(Pool.bytes_for(pooled_shapes(model), torch.float32), torch.float32, "cuda"), torch.float32, "cuda"
    )
    model.set_attn_implementation(MASKLESS)
    if make == "fused":
        fuse(model)
    shapes = full_cache_shapes(config, 2, 100)
    pool = Pool(Pool.bytes_for(shapes, torch.float32), torch.float32, "cuda", scale=1.0)
    logits = []
    for tuned in (False, True):
        step = DecodeStep(model, full_cache(shapes, pool), 2, 100)
        step.prepare(tuned=tuned)
        step._tokens.fill_(5)
        step()
        assert step.peak_bytes > 0
        logits.append(step.logits.clone())
    # other kernels, maybe in TF32, whose sums of some hundred terms are good to 2^-11 of their size
    torch.testing.assert_close(*logits, rtol=2**-7, atol=2**-7 * logits[0].abs().max().item())


class Recorded:
    """A step that notes its turns and takes no time."""

    def __init__(self, name: str, turns: list[str], count: int) -> None:
        self.name, self.turns, self.count = name, turns, count

    def __call__(self) -> None:
        self.turns.append(self.name)

    def steps_at_a_time(self, most: int) -> int:
        return min(most, self.count)


def test_arms_take_turns() -> None:
    turns: list[str] = []
    seconds = timed_rounds([Recorded("a", turns, 9), Recorded("b", turns, 1)], 3, 2, "cpu")
    assert "".join(turns) == "aab" * 3
    assert [len(each) for each in seconds] == [3, 3]


def test_a_slow_step_takes_fewer_at_a_time() -> None:
    model = ready(LLAMA)
    shapes = full_cache_shapes(LLAMA, 1, 4)
    pool = Pool(Pool.bytes_for(shapes, torch.float64), torch.float64, "cpu")
    step = DecodeStep(model, full_cache(shapes, pool), 1, 4)
    for seconds, expected in ((0.0, 8), (0.01, 8), (0.5, 4), (100.0, 1)):
        step.seconds = seconds
        assert step.steps_at_a_time(8) == expected


def test_speedups_are_of_the_same_round() -> None:
    seconds = {
        ("dense", None): [4.0, 8.0, 6.0],
        ("untied", 0.5): [2.0, 2.0, 3.0],
        ("untied", 0.7): [1.0, 1.0, 1.0],
        ("ours", 0.5): [1.0, 4.0, 2.0],
    }
    found = speedups("ours", 0.5, seconds)
    assert found.keys() == {"dense", "untied"}
    assert found["dense"]["median"] == median([4.0, 2.0, 3.0])
    assert found["untied"]["median"] == median([2.0, 0.5, 1.5])
    assert speedups("dense", None, seconds) == {}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "lower": 2.0, "upper": 4.0}


def test_positions_and_windows() -> None:
    assert check_positions(dense_model(LLAMA), 2047) is None
    remark = check_positions(dense_model(LLAMA), 4096)
    assert remark is not None
    assert "beyond the 2048 positions" in remark
    assert check_positions(dense_model(OPT), 63) is None
    with pytest.raises(ValueError, match="64 learned positions; ask for at most 63"):
        check_positions(dense_model(OPT), 64)
    with pytest.raises(ValueError, match="window 4096"):
        full_cache_shapes(MistralConfig(), 1, 8)
    assert full_cache_shapes(LLAMA, 3, 8) == [torch.Size((3, 2, 9, 6))] * 6


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"contexts": (512, 1)}, "contexts: 1 is too few"),
        ({"batches": (0,)}, "batches: 0"),
        ({"rounds": 1}, "rounds: 1"),
        ({"threads": 0}, "threads: 0"),
        ({"ratios": (0.3, 1.0)}, "1.0"),
        ({"ratios": (0.3, 0.3)}, "each once"),
        ({"arms": ("ours", "theirs")}, "no 'theirs'"),
        ({"dtypes": ("int8",)}, "no 'int8'"),
        ({"dtypes": ()}, "at least one"),
        ({"device": "tpu"}, "not on 'tpu'"),
        ({"device": "mps"}, "not on 'mps'"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecodeSettings(model="llama-810m", **values)


def test_what_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch, config_file: str) -> None:
    settings = DecodeSettings(model=config_file, contexts=(8, 999), ratios=(0.5,), rounds=2, tokens=1, device="cpu")
    full = 999 * 3 * 2 * 2 * 6 * 4
    monkeypatch.setattr(decode_cell, "available_bytes", lambda _: decode_cell.SPARE_BYTES + full - 1)
    short, long = decode(settings)["cells"]
    reasons = {arm["name"]: arm["reason"] for arm in long["arms"]}
    short_of = [name for name, reason in reasons.items() if reason is not None and reason.startswith("does not fit")]
    assert short_of == ["dense", "untied", "untied-ready", "ours", "ours-ready"]
    assert reasons["latent-rebuilt"] is None
    assert all(arm["reason"] is None or "GPU" in arm["reason"] for arm in short["arms"])
    rows = [arm for arm in long["arms"] if arm["name"] == "latent-rebuilt"]
    assert rows[0]["byte_bound"] > 1
    assert rows[0]["speedup"] == {}


def test_weights_that_do_not_fit_are_an_error(monkeypatch: pytest.MonkeyPatch, config_file: str) -> None:
    monkeypatch.setattr("lsp_core.decode_variants.available_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match=r"float32 need 0\.0 GiB.*--dtype bfloat16"):
        decode(DecodeSettings(model=config_file, contexts=(8,), device="cpu"))


def test_what_fits_is_measured_beside_what_does_not(monkeypatch: pytest.MonkeyPatch, config_file: str) -> None:
    dense, ours = dense_model(LLAMA), tied_model(LLAMA, described_units(LLAMA, 0.7))
    sizes = [Pool.bytes_for(pooled_shapes(model), torch.float32) for model in (dense, ours)]
    monkeypatch.setattr("lsp_core.decode_variants.available_bytes", lambda _: sizes[0] - 1)
    arms = measured_arms(config_file, ratios=(0.7,), arms=("dense", "ours"))
    assert arms["dense"]["reason"].startswith("does not fit: the weights need")
    assert arms["ours"]["reason"] is None
    assert arms["ours"]["speedup"] == {}


def measured_arms(model: str, **values: Any) -> dict[str, Any]:
    settings = DecodeSettings(model=model, contexts=(8,), rounds=2, tokens=1, device="cpu", **values)
    return {arm["name"]: arm for arm in decode(settings)["cells"][0]["arms"]}


UNTUNED = ("dense", "untied", "untied-ready", "ours", "ours-ready", "latent-rebuilt", "latent-rotated")


@pytest.mark.parametrize(
    ("where", "error", "failed"),
    [
        ("decode_variants.make_ready", RuntimeError("no such kernel"), UNTUNED[2:3] + UNTUNED[4:]),
        ("decode_cell.started_cache", ValueError("no latents here"), UNTUNED[5:]),
        ("decode_variants.untied_model", ValueError("cannot be reached"), UNTUNED[1:3]),
    ],
)
def test_what_fails_is_a_reason_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, config_file: str, where: str, error: Exception, failed: tuple[str, ...]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"lsp_core.{where}", fail)
    arms = measured_arms(config_file, ratios=(0.5,), arms=UNTUNED)
    assert tuple(name for name, arm in arms.items() if arm["reason"] is not None) == failed
    assert all(str(error) in arms[name]["reason"] for name in failed)


def test_logits_that_are_not_finite_are_a_reason(monkeypatch: pytest.MonkeyPatch, config_file: str) -> None:
    run = DecodeStep._run

    def overflow(step: DecodeStep) -> None:
        run(step)
        if isinstance(step._model.config, LSPConfig):
            step.logits = step.logits * torch.inf

    monkeypatch.setattr(DecodeStep, "_run", overflow)
    arms = measured_arms(config_file, ratios=(0.5,), arms=("dense", "ours"))
    assert arms["dense"]["reason"] is None
    assert "are not finite" in arms["ours"]["reason"]


def test_a_checkpoint_in_which_nothing_is_factored_has_no_untied_model(tmp_path: Path) -> None:
    tied_model(LLAMA, []).config.save_pretrained(tmp_path)
    arms = measured_arms(str(tmp_path), arms=UNTUNED)
    without = [name for name, arm in arms.items() if arm["reason"] is not None]
    assert without == ["untied", "untied-ready"]
    assert "nothing is factored" in arms["untied"]["reason"]
    assert arms["ours"]["realized_ratio"] == 0


def test_untied_pairs_are_made_ready_as_ours_are() -> None:
    settings = DecodeSettings(model="", ratios=(0.5,), device="cpu", arms=UNTUNED)
    variants, _ = variants_of(settings, LLAMA, {0.5: described_units(LLAMA, 0.5)})
    give_weights(variants, settings, "float32")
    for variant in variants[1:]:
        layers = [module for module in variant.model.modules() if isinstance(module, FactoredLinear)]
        weights = [each.weight for each in layers if not isinstance(each.output_factor, Shared)]
        assert weights
        by_columns = {weight.stride() == (1, weight.shape[0]) for weight in weights}
        assert by_columns == {variant.kind not in ("untied", "ours")}, variant.kind


def test_what_is_ready_is_compared_with_untied_pairs_that_are() -> None:
    names = ("dense", "untied", "untied-ready", "ours", "ours-ready", "latent-rebuilt")
    seconds = {(name, None if name == "dense" else 0.5): [2.0**-index] * 2 for index, name in enumerate(names)}
    arms = [
        {
            "name": name,
            "ratio": ratio,
            "realized_ratio": ratio,
            "reason": None,
            "tokens_per_second": spread([1.0, 1.0]),
            "speedup": speedups(name, ratio, seconds),
            "byte_bound": 1.0,
            "bandwidth_share": 0.5,
            "weights_bytes": 1,
            "cache_bytes": 1,
            "peak_bytes": 3 * 2**29,
        }
        for name, ratio in seconds
    ]
    cell = {"dtype": "float32", "batch": 1, "context": 8, "copy_bytes_per_second": 1e9, "arms": arms}
    result = {"model": "m", "device": "d", "threads": 1, "torch": "t", "notes": [], "cells": [cell]}
    header, _, *rows = [[part.strip() for part in line.split("|")[1:-1]] for line in table(result) if line[:1] == "|"]
    untied = {row[1]: row[header.index("x untied")] for row in rows}
    expected = {"dense": "", "untied": "", "untied-ready": "2.00", "ours": "4.00", "ours-ready": "4.00"}
    assert untied == {**expected, "latent-rebuilt": "8.00"}
    assert {row[header.index("peak GiB")] for row in rows} == {"1.50"}
    for arm in arms:
        arm["peak_bytes"] = None
    assert not any("peak" in line for line in table(result))


def test_the_weights_of_one_dtype_are_gone_before_those_of_the_next(
    monkeypatch: pytest.MonkeyPatch, config_file: str
) -> None:
    given: list[weakref.ref[torch.nn.Module]] = []  # models whose weights are views of a pool
    alive: list[int] = []

    class Watched(Pool):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            alive.append(sum(model() is not None for model in given))
            super().__init__(*args, **kwargs)

    def watched(model: Any, *args: Any) -> Any:
        given.append(weakref.ref(model))
        return materialize(model, *args)

    monkeypatch.setattr(decode_variants, "Pool", Watched)
    monkeypatch.setattr(decode_variants, "materialize", watched)
    dtypes = ("float32", "bfloat16", "float16")
    decode(DecodeSettings(model=config_file, contexts=(8,), dtypes=dtypes, rounds=2, tokens=1, device="cpu"))
    assert len(given) > 3
    assert alive == [0, 0, 0]


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 37,
}
LATENTS = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None), "is a mixture of experts"),
        (DeepseekV3Config(**SMALL, **LATENTS, first_k_dense_replace=2), "multi-head latent attention"),
        (MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=37), "full attention only"),
        (MistralConfig(**SMALL), "window 4096"),
    ],
)
def test_models_that_would_be_measured_wrong_are_refused(config: PreTrainedConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_decoder(dense_model(config))


def test_a_table_of_positions_ends_where_it_ends() -> None:
    model = dense_model(GPTJConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=37, n_positions=16, rotary_dim=4))
    check_positions(model, 15)
    with pytest.raises(ValueError, match="a table of 16 positions; ask for at most 15"):
        check_positions(model, 16)


def test_a_gpu_may_be_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert DecodeSettings(model="", device="cuda:1").on_gpu
    with pytest.raises(ValueError, match="there is no cuda:2, torch sees 2 GPUs"):
        DecodeSettings(model="", device="cuda:2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_architecture": "BertModel"}, "a compressed BertModel is no decoder"),
        ({"base_architecture": None}, "an earlier format"),
        ({"units": [{"name": "x"}]}, "an earlier format"),
    ],
)
def test_checkpoints_that_do_not_decode_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = tied_model(LLAMA, described_units(LLAMA, 0.5)).config
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        decode(DecodeSettings(model=str(tmp_path), contexts=(8,), device="cpu"))


def test_where_nothing_can_be_written_is_told_at_once(tmp_path: Path) -> None:
    settings = DecodeSettings(model="llama-2-7b", device="cpu")
    (tmp_path / "file").touch()
    for output, words in ((tmp_path, "is a folder"), (tmp_path / "file" / "below.json", "cannot be written")):
        with pytest.raises(ValueError, match=words):
            decode(settings, output)


def test_a_compressed_model_is_measured_at_its_own_ranks(tmp_path: object, config_file: str) -> None:
    units = described_units(LLAMA, 0.4)
    tied_model(LLAMA, units).config.save_pretrained(tmp_path)
    result = decode(
        DecodeSettings(model=str(tmp_path), contexts=(8,), rounds=2, tokens=1, device="cpu", arms=("dense", "ours"))
    )
    assert [ranks["tied"] for ranks in result["ranks"]] == [{unit["name"]: unit["rank"] for unit in units}]
    arms = {arm["name"]: arm for arm in result["cells"][0]["arms"]}
    assert abs(arms["ours"]["realized_ratio"] - 0.4) < 0.02
    assert arms["ours"]["ratio"] == arms["ours"]["realized_ratio"]
    assert any("| ours |" in line for line in table(result))


def test_copy_bandwidth_counts_reading_and_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("lsp_core.decode_step.now", lambda _: float(next(clock)))
    monkeypatch.setattr("lsp_core.decode_step.COPY_BYTES", {"cpu": 4096})
    assert copy_bandwidth("cpu") == 2 * 4096


@pytest.fixture(autouse=True)
def short_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lsp_core.decode_step.COPY_BYTES", {"cpu": 1 << 20})


@pytest.fixture
def config_file(tmp_path: object) -> str:
    path = tmp_path / "tiny.json"  # type: ignore[operator]
    LLAMA.to_json_file(path)
    return str(path)
