"""A decode step computes what the model computes, and what is reported of it is what was measured."""

from collections.abc import Callable
from statistics import median

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, OPTConfig, PreTrainedConfig

from lsp_core import decode_cell
from lsp_core.decode_benchmark import decode
from lsp_core.decode_cache import FixedLayer, check_positions, full_cache, full_cache_shapes
from lsp_core.decode_latent import bytes_per_token, fill, started_cache
from lsp_core.decode_report import speedups, spread, table
from lsp_core.decode_settings import DecodeSettings
from lsp_core.decode_step import MASKLESS, DecodeStep, copy_bandwidth, timed_rounds
from lsp_core.fused import fuse
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
    assert short_of == ["dense", "untied", "ours", "ours-ready"]
    assert reasons["latent-rebuilt"] is None
    assert all(arm["reason"] is None or "GPU" in arm["reason"] for arm in short["arms"])
    rows = [arm for arm in long["arms"] if arm["name"] == "latent-rebuilt"]
    assert rows[0]["byte_bound"] > 1
    assert rows[0]["speedup"] == {}


def test_weights_that_do_not_fit_are_an_error(monkeypatch: pytest.MonkeyPatch, config_file: str) -> None:
    monkeypatch.setattr("lsp_core.decode_benchmark.available_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match=r"float32 need 0\.0 GiB.*--dtype bfloat16"):
        decode(DecodeSettings(model=config_file, contexts=(8,), device="cpu"))


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
