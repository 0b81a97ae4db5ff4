"""Several seeds and several learning rates: what they share, what is kept, what the report says."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.compress import compress
from flows.config import CompressConfig
from flows.plan import plan
from lsp_core.modeling import load_compressed

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]

TRAINING = {"epochs": 2, "batch_sequences": 8, "learning_rate": [1e-5, 3e-2]}
SEEDS = [0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeds")


@pytest.fixture(scope="module")
def planned(folder: Path, tiny_config: Make) -> dict[str, Any]:
    return plan(tiny_config(folder, seeds=SEEDS, training=TRAINING))


@pytest.fixture(scope="module")
def report(folder: Path, planned: dict[str, Any], tiny_config: Make) -> dict[str, Any]:
    return compress(tiny_config(folder, seeds=SEEDS, training=TRAINING))


def test_a_plan_covers_all_seeds_and_rates(planned: dict[str, Any], report: dict[str, Any]) -> None:
    assert [step["label"] for step in planned["stages"]] == [stage["label"] for stage in report["stages"]]
    assert {"train 0.3-kl rate 0.03 seed 1", "select 0.3-kl seed 1"} <= {step["label"] for step in planned["stages"]}
    (selected, _) = (step for step in planned["stages"] if step["label"].startswith("select"))
    assert selected["written_bytes"] > 1000


def test_what_no_seed_can_change_is_shared(report: dict[str, Any]) -> None:
    labels = {stage["label"] for stage in report["stages"]}
    assert {label for label in labels if "seed" not in label} == {"calibrate test", "evaluate dense"}
    for name in ("calibrate training", "gather", "measure", "train teacher", "merge 0.3-kl", "report"):
        assert {f"{name} seed 0", f"{name} seed 1"} <= labels
    assert len({stage["key"] for stage in report["stages"]}) == len(report["stages"])


def test_a_seed_is_what_a_run_with_that_seed_makes(
    report: dict[str, Any], folder: Path, tiny_config: Make, tiny_text: dict[str, Path], tmp_path: Path
) -> None:
    calibration = {"text": {"path": tiny_text["train"]}, "sequences": 16, "sequence_length": 32, "seed": 1}
    alone = compress(tiny_config(folder, calibration=calibration, training={**TRAINING, "seed": 1}, output=tmp_path))
    assert {stage["state"] for stage in alone["stages"]} == {"Cached"}
    (expected,) = alone["results"]
    result = next(result for result in report["results"] if result["seed"] == 1)
    assert {**result, "checkpoint": None} == {**expected, "seed": 1, "checkpoint": None}
    (only,) = compress(tiny_config(folder, seeds=[1], training=TRAINING, output=tmp_path))["results"]
    assert only == expected
    assert Path(only["checkpoint"]) == tmp_path / "checkpoints" / "0.3-kl"


def test_the_report_has_every_seed_and_their_mean_and_deviation(report: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "output" / "report.json").read_text()) == report
    assert (report["seeds"], [result["seed"] for result in report["results"]]) == (SEEDS, SEEDS)
    (summary,) = report["summary"]
    for name in ("perplexity", "perplexity_init", "perplexity_init_uniform", "kl_joint", "realized_ratio"):
        values = [result[name] for result in report["results"]]
        assert summary["mean"][name] == statistics.fmean(values)
        assert summary["std"][name] == statistics.stdev(values)
    assert summary["std"]["perplexity"] > 0
    mean, deviation = summary["mean"]["perplexity"], summary["std"]["perplexity"]
    assert f" {mean:.2f} ± {deviation:.2f} " in (folder / "output" / "report.md").read_text()


def test_each_seed_has_a_checkpoint_and_plots(report: dict[str, Any], folder: Path) -> None:
    output = folder / "output"
    assert {path.name for path in (output / "checkpoints").iterdir()} == {"0.3-kl-seed-0", "0.3-kl-seed-1"}
    for result in report["results"]:
        assert sum(p.numel() for p in load_compressed(result["checkpoint"]).parameters()) == result["parameters"]
    text = (output / "report.md").read_text()
    for seed in SEEDS:
        assert f"](plots/seed-{seed}/retained_ranks.png)" in text
        assert (output / "plots" / f"seed-{seed}" / "retained_ranks.png").stat().st_size > 1000
    assert len(report["grids"]) == 2


def test_the_rate_that_validates_best_is_kept(report: dict[str, Any], folder: Path) -> None:
    for result in report["results"]:
        assert [tried["learning_rate"] for tried in result["sweep"]] == TRAINING["learning_rate"]
        assert result["validated_on"] == "perplexity"
        best = min(result["sweep"], key=lambda tried: tried["validation"])
        assert result["learning_rate"] == best["learning_rate"]
        assert result["best_epoch"] == best["best_epoch"]
        assert result["history"][best["best_epoch"]]["validation"] == best["validation"]
        assert len({tried["validation"] for tried in result["sweep"]}) == 2
    text = (folder / "output" / "report.md").read_text()
    assert "## Learning rates" in text
    assert text.count("| kept |") == 2


def test_one_rate_in_a_list_is_that_rate(tiny_config: Make, tmp_path: Path) -> None:
    several = tiny_config(tmp_path, training={"learning_rate": [1e-3]})
    assert several == tiny_config(tmp_path, training={"learning_rate": 1e-3})
    assert several.training.rates == (1e-3,)
    assert tiny_config(tmp_path).training.rates == (None,)


@pytest.mark.parametrize(
    ("arguments", "rates"),
    [
        (["--training.learning_rate", "1e-3", "--training.learning_rate", "1e-4"], (1e-3, 1e-4)),
        (["--training.learning_rate", "[1e-3, 1e-4]"], (1e-3, 1e-4)),
        (["--training.learning_rate", "1e-3"], (1e-3,)),
        (["--training.learning_rate", "null"], (None,)),
        ([], (0.5, 0.25)),
    ],
)
def test_the_command_line_takes_one_rate_or_several(
    arguments: list[str], rates: tuple[float | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CompressConfig] = []
    monkeypatch.setattr(cli.Compress, "cli_cmd", lambda self: seen.append(self.to_config()))
    (tmp_path / "config.yaml").write_text(
        "model: {name_or_path: m}\ntraining: {learning_rate: [0.5, 0.25]}\nseeds: [4]"
    )
    assert cli.main(["compress", str(tmp_path / "config.yaml"), *arguments, "--seeds", "0", "--seeds", "2"]) == 0
    assert seen[0].training.rates == rates
    assert seen[0].seeds == (0, 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("training: {learning_rate: [1e-3, -1]}", "training.learning_rate: Input should be a number greater than 0"),
        ("training: {learning_rate: []}", "training.learning_rate: Input should be a number greater than 0"),
        ("training: {learning_rate: fast}", "training.learning_rate: Input should be a number greater than 0"),
        ("training: {learning_rate: [0.1, 1e-1]}", "training.learning_rate: learning rates listed twice: 0.1"),
        ("seeds: [1, 1]", "seeds: seeds listed twice: 1"),
        ("seeds: [-1]", "seeds.0: Input should be greater than or equal to 0"),
    ],
)
def test_a_wrong_list_is_one_line_and_exit_2(
    values: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(f"model: {{name_or_path: m}}\n{values}\n")
    assert cli.main(["compress", str(tmp_path / "config.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
