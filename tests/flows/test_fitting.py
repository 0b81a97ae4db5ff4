"""What decoding cannot be timed of is refused before anything is computed; what it costs is in the plan."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from flows import sets as drawn
from flows.config import CompressConfig
from flows.estimates import BANDWIDTH, Estimates
from flows.fitting import check_decode
from flows.graph import build, compress_target, initialize
from flows.plan import Planner
from flows.prepared import prepare
from flows.sources import DecodeConfig
from lsp_core.decode_step import COPY_BYTES
from lsp_core.random_models import dense_model
from tasks.models import ModelSource
from tasks.places import open_store

Make = Callable[..., CompressConfig]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def decoded(config: CompressConfig, **values: Any) -> CompressConfig:
    evaluation = config.evaluation.model_copy(update={"decode": DecodeConfig(**values)})
    return config.model_copy(update={"evaluation": evaluation})


@pytest.mark.parametrize("contexts", [(1,), (8, 8), (0, 8)])
def test_contexts_that_are_none_are_refused(contexts: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError):
        DecodeConfig(contexts=contexts)


@pytest.mark.parametrize(
    ("config", "dtype", "device", "words"),
    [
        (LlamaConfig(**SMALL), torch.float64, "cpu", "dtypes: there is no 'float64'"),
        (LlamaConfig(**SMALL), torch.float32, "mps", "not on 'mps'"),
        (MixtralConfig(**SMALL, num_key_value_heads=4, sliding_window=None), torch.float32, "cpu", "of experts"),
    ],
)
def test_what_cannot_be_timed_is_refused_at_once(
    tiny_config: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: str,
    words: str,
) -> None:
    monkeypatch.setattr("flows.fitting.resolve_device", lambda _: device)
    model = cast(ModelSource, SimpleNamespace(task="causal-lm", name="m", torch_dtype=dtype))
    asked = decoded(tiny_config(tmp_path), contexts=(8,))
    with pytest.raises(ValueError, match=rf"^evaluation\.decode: .*{words}"):
        check_decode(asked, model, dense_model(config))
    check_decode(decoded(tiny_config(tmp_path)), model, dense_model(config))  # it is not asked for


def test_a_target_of_an_ablation_is_not_timed(tiny_config: Make, tmp_path: Path) -> None:
    prepared = prepare(decoded(tiny_config(tmp_path), contexts=(8,)), partly=True)
    store = open_store(str(tmp_path / "store"), verify=False, writable=False)

    def planner() -> Planner:
        return Planner(store=store, estimates=Estimates(prepared, store))

    alone, whole = planner(), planner()
    sets = drawn.draw(alone, prepared, drawn.test_examples(alone, prepared))
    made = compress_target(alone, prepared, sets, initialize(alone, prepared, sets), prepared.config.targets[0])
    build(whole, prepared)
    assert made.decode is None
    labels = [[step.label for step, _ in each.costs if step.label.startswith("decode")] for each in (alone, whole)]
    assert labels == [[], ["decode 0.3-kl"]]


def test_the_plan_counts_what_a_step_reads(tiny_config: Make, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), verify=False, writable=False)

    def cost(**values: Any) -> Any:
        prepared = prepare(decoded(tiny_config(tmp_path), **values), partly=True)
        planner = Planner(store=store, estimates=Estimates(prepared, store))
        build(planner, prepared)
        return next(cost for step, cost in planner.costs if step.label.startswith("decode"))

    one, two, wide = cost(contexts=(8,)), cost(contexts=(8, 16)), cost(contexts=(8,), batch=4)
    assert two.more_seconds > 2 * one.more_seconds
    assert wide.more_seconds > one.more_seconds
    assert wide.flops == 4 * one.flops
    assert two.flops == 2 * one.flops
    assert one.more_seconds > 2 * COPY_BYTES["cpu"] / BANDWIDTH["cpu"]
    assert one.peak_bytes > 2 * COPY_BYTES["cpu"]
    assert cost(contexts=(8,), tuned=True) == one  # on a CPU nothing is compiled
    large = cost(contexts=(2_000_000,))  # rotary positions end nowhere
    held = 3 * 2_000_001 * 2 * 2 * 32 * 4  # keys and values of 2 blocks, 32 wide, in float32; thrice
    assert large.peak_bytes - one.peak_bytes == held - 2 * COPY_BYTES["cpu"]
