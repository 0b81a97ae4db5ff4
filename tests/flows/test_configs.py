"""The example configs are valid, name models of the right size, and can be planned without network or weights."""

from pathlib import Path
from typing import Any

import pytest

import flows.plan
from flows.cli import main
from flows.config import CompressConfig, Target
from flows.plan import plan
from flows.settings_file import read_yaml
from tasks.models import find_model, load_skeleton
from tasks.rates import Rates

REPOSITORY = Path(__file__).parents[2]
CONFIGS = {path.stem: path for path in sorted((REPOSITORY / "configs").glob("*.yaml"))}
LARGE = ("llama2-7b-wikitext2", "qwen3-4b-c4")
FAST = ("opt-125m-wikitext2", "vit-b16-diverse")
GIB = 141  # of the device that the settings are made for
RATES = Rates(
    device="a device of round numbers",
    width=1024,
    flops_per_second=1e12,
    gradient_flops_per_second=1e12,
    head_flops_per_second=1e12,
    flops64_per_second=1e12,
    solver_flops_per_second=1e12,
    logits_per_second=1e9,
    bytes_per_second=1e9,
    measured="1970-01-01",
)
POSITIONS, PATCHES, WIDTH, INNER, BLOCKS = 197, 3 * 16 * 16, 768, 3072, 12
ATTENTION, MLP = 4 * (WIDTH * WIDTH + WIDTH), 2 * WIDTH * INNER + WIDTH + INNER
VIT = BLOCKS * (ATTENTION + MLP + 2 * 2 * WIDTH) + 2 * WIDTH  # blocks and norms, and the last norm
VIT += PATCHES * WIDTH + WIDTH + WIDTH + POSITIONS * WIDTH + 100 * WIDTH + 100  # patches, class token, positions, head
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "qwen3-4b": 4_022_468_096,
    "opt-125m": 125_239_296,
    "vit-b16-cifar100": VIT,
}
PAPER: dict[str, dict[str, Any]] = {  # appendix 'Implementation Details'
    "llama2-7b-wikitext2": {"precision": "float32", "points": 16, "batch": 8, "dropout": 0.1, "images": False},
    "qwen3-4b-c4": {"precision": "float32", "points": 16, "batch": 8, "dropout": 0.05, "images": False},
    "opt-125m-wikitext2": {"precision": "float64", "points": 8, "batch": 32, "dropout": 0.05, "images": False},
    "vit-b16-cifar100": {"precision": "float64", "points": 8, "batch": 512, "dropout": 0.05, "images": True},
    "vit-b16-diverse": {"precision": "float64", "points": 8, "batch": 512, "dropout": 0.05, "images": True},
}


@pytest.fixture(autouse=True)
def _at_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configs name folders as seen from there; no rate is measured."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(flows.plan, "device_rates", lambda *_, **__: RATES)


def loaded(name: str, **changes: Any) -> CompressConfig:
    return CompressConfig.model_validate(read_yaml(CONFIGS[name]) | changes)


def test_every_example_is_tested() -> None:
    assert CONFIGS.keys() == PAPER.keys()
    assert {path.parent.name for path in (REPOSITORY / "configs" / "models").glob("*/config.json")} == set(PARAMETERS)
    assert {Path(loaded(name).model.name_or_path).name for name in CONFIGS} == set(PARAMETERS)


@pytest.mark.parametrize("name", PAPER)
def test_the_settings_are_the_papers(name: str) -> None:
    config, paper = loaded(name), PAPER[name]
    assert config.model.dtype == "bfloat16"
    assert config.precision == paper["precision"]
    assert (config.init, config.allocation.method, config.merge_tolerance) == ("whitened", "measured_kl", 0.05)
    assert config.allocation.grid_points == paper["points"]
    assert config.training.batch_sequences == paper["batch"]
    assert (config.training.dropout, config.training.orthogonality) == (paper["dropout"], 0.05)
    assert config.training.modulation_epochs == 1
    if paper["images"]:
        assert (config.calibration.gram_sequences, config.allocation.sequences) == (10_000, 4096)
        assert config.training.epoch_sequences == 4096
    else:
        assert (config.calibration.sequences, config.calibration.sequence_length) == (1024, 2048)
        assert config.allocation.sequences * config.calibration.sequence_length == 128 * 1024
    ratios = (0.2, 0.4, 0.6) if name == "qwen3-4b-c4" else (0.3, 0.5, 0.7)
    objectives = {target.objective for target in config.targets}
    assert objectives == ({"kl"} if name == "vit-b16-diverse" else {"kl", "task"})
    assert {(t.ratio, t.objective) for t in config.targets} == {(r, o) for r in ratios for o in objectives}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_config_alone_has_the_size_of_the_model(name: str) -> None:
    skeleton = load_skeleton(find_model(f"configs/models/{name}", partly=True))
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert skeleton.num_parameters() == PARAMETERS[name]


def planned(config: CompressConfig) -> dict[str, Any]:
    content = plan(config, device_gib=GIB)
    assert content["fits"]
    assert {step["state"] for step in content["stages"]} <= {"miss", "unknown"}
    on_device = ("evaluate", "gather", "bases", "measure", "train", "merge")
    for step in content["stages"]:
        assert step["seconds"] >= 0
        assert step["written_bytes"] > 0
        assert step["peak_bytes"] > 0 or not step["label"].startswith(on_device), step["label"]
    return content


@pytest.mark.parametrize("name", FAST)
def test_one_target_is_planned_from_the_model_config_alone(name: str, tmp_path: Path) -> None:
    config = loaded(name, targets=[{"ratio": 0.7}], store=str(tmp_path / "store"), device="cpu", teacher_cache_gib=64.0)
    content = planned(config)
    trainings = [step for step in content["stages"] if step["label"].startswith("train 0.7-kl")]
    assert len(trainings) == len(config.training.rates)
    assert len({(step["flops"], step["peak_bytes"]) for step in trainings}) == 1  # a rate costs what another does
    drawn = config.training.epoch_sequences or config.calibration.sequences
    per_pass = next(step["flops"] for step in content["stages"] if step["label"] == "train teacher")
    passes = config.training.epochs * drawn / config.calibration.sequences
    assert 0.3 * per_pass * passes < trainings[0]["flops"] < 4 * per_pass * passes  # forward and back, at 30 % of it


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_the_command_plans_every_stage(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the device that the settings are made for; it exits with 0 where everything fits."""
    arguments = ["plan", str(CONFIGS[name]), "--device-gib", str(GIB), "--device", "cpu", "--store", str(tmp_path)]
    if name in LARGE:  # of these one target: each takes minutes
        arguments += ["--ratio", "0.4", "--objective", "kl"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" not in printed
    for target in [Target(ratio=0.4)] if name in LARGE else loaded(name).targets:
        assert f"merge {target.name}" in printed
