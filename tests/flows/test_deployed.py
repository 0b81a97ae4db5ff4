"""The flows for deployments: a checkpoint evaluated by itself, and a benchmark."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli import main
from flows.compress import compress
from flows.config import CompressConfig
from flows.deployed_benchmark import BenchmarkConfig, benchmark_flow
from flows.deployed_evaluate import evaluate_flow
from flows.evaluate_config import EvaluateConfig
from tests.flows.test_artifacts import shown

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deployed")


@pytest.fixture(scope="module")
def report(folder: Path, tiny_config: Make) -> dict[str, Any]:
    return compress(tiny_config(folder))


@pytest.fixture
def config(folder: Path, tiny_config: Make, tmp_path: Path) -> Callable[[Path | str], EvaluateConfig]:
    """Returns a maker of configurations that evaluate a model as the compression does, in its store."""
    compressed = tiny_config(folder)
    chosen = compressed.evaluation.model_dump(include={"text", "bos", "prompt", "prompt_tokens", "tasks"})
    chosen["sequence_length"] = compressed.test_length

    def make(model: Path | str) -> EvaluateConfig:
        return EvaluateConfig(
            model={"name_or_path": str(model)},
            evaluation=chosen,
            store=compressed.store,
            output=tmp_path / "evaluated",
            device="cpu",
        )

    return make


def test_a_dense_model_is_taken_from_the_store_of_a_compression(
    report: dict[str, Any], config: Callable[[Path | str], EvaluateConfig], tiny_model: Path, tmp_path: Path
) -> None:
    found = evaluate_flow(config(tiny_model))
    assert [stage["state"] for stage in found["stages"]] == ["Cached", "Cached"]
    assert found["perplexity"] == report["dense"]["perplexity"]
    assert json.loads((tmp_path / "evaluated" / "evaluation.json").read_text()) == found
    artifacts = shown(found["run"])
    assert artifacts.keys() >= {"plan", "evaluation", "stages"}
    assert f"{found['perplexity']:.4g}" in artifacts["evaluation"]


def test_a_compressed_folder_gives_the_figures_of_the_report_and_is_cached(
    report: dict[str, Any], config: Callable[[Path | str], EvaluateConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = report["results"]
    first = evaluate_flow(config(result["checkpoint"]))
    assert [stage["label"] for stage in first["stages"]] == ["calibrate test", "evaluate"]
    for name in ("perplexity", "parameters", "continuation"):
        assert first[name] == result[name]
    file = Path(first["config"]["output"]) / "config.yaml"
    file.write_text(yaml.safe_dump(first["config"]))
    assert main(["evaluate", str(file), "--micro_batch", "2", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {stage["state"] for stage in again["stages"]} == {"Cached"}
    assert (again["perplexity"], again["config"]["micro_batch"]) == (result["perplexity"], 2)


def test_several_workers_and_one_block_at_a_time_give_the_same_figures(
    report: dict[str, Any],
    config: Callable[[Path | str], EvaluateConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (result,) = report["results"]
    given = config(result["checkpoint"]).model_dump()
    given |= {"store": str(tmp_path / "store"), "workers": {"count": 2}, "offload": True, "micro_batch": 1}
    found = evaluate_flow(EvaluateConfig(**given))
    assert {stage["state"] for stage in found["stages"]} == {"Completed"}
    assert "evaluate: 2 parts, 2 workers" in caplog.text
    for name in ("parameters", "continuation"):
        assert found[name] == result[name]
    assert found["perplexity"] == pytest.approx(result["perplexity"], rel=1e-5)  # float32, other micro-batches


def test_what_cannot_be_evaluated_is_refused(config: Callable[[Path | str], EvaluateConfig], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertModel

    good = config(tmp_path)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        evaluate_flow(good)
    encoder = tmp_path / "bert"
    BertModel(
        BertConfig(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ).save_pretrained(encoder)
    AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "flows" / "demo_model").save_pretrained(encoder)
    with pytest.raises(ValueError, match="is no language model"):
        evaluate_flow(config(encoder))


def test_a_benchmark_is_published(tmp_path: Path) -> None:
    config = BenchmarkConfig(
        benchmark="store", store={"file_mib": 1, "rows": 20, "points": 2, "left": 3}, output=tmp_path
    )
    state = benchmark_flow(config, return_state=True)
    content = state.result()
    assert json.loads((tmp_path / "benchmark.json").read_text()) == content
    rows = {row["figure"]: row["value"] for row in shown(str(state.state_details.flow_run_id))["benchmark-store"]}
    assert rows["grid_rows_left"] == content["grid_rows_left"]
    assert {"sha256sum: seconds", "remembered: ms", "grid_ratio"} <= rows.keys()


def test_a_benchmark_of_an_unknown_device_is_refused(tmp_path: Path) -> None:
    config = BenchmarkConfig(benchmark="decode", device="abacus", output=tmp_path)
    with pytest.raises(ValueError, match="abacus"):
        benchmark_flow(config)
