"""The flow from end to end on a tiny random Llama, and what a second run takes from the store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from flows.compress import compress
from flows.config import CompressConfig
from flows.sources import DecodeConfig
from lsp_core.modeling import load_compressed
from storage.grid import KLGrid

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]

LEFT_OF_ALLOCATE = ("calibrate", "gather", "bases", "measure")
LEFT_OF_TRAIN = (*LEFT_OF_ALLOCATE, "allocate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compress")


@pytest.fixture(scope="module")
def first(folder: Path, tiny_config: Make) -> dict[str, Any]:
    return compress(tiny_config(folder))


def states(report: dict[str, Any], *names: str) -> set[str]:
    return {stage["state"] for stage in report["stages"] if not names or stage["name"] in names}


def test_the_report_has_every_field(first: dict[str, Any], folder: Path) -> None:
    report = json.loads((folder / "output" / "report.json").read_text())
    assert report == first
    assert states(report) == {"Completed"}
    assert {stage["name"] for stage in report["stages"]} == {*LEFT_OF_TRAIN, "train", "merge", "evaluate", "report"}
    assert set(report["dense"]) >= {"perplexity", "parameters"}
    assert set(report["units"][0]) >= {"name", "side", "members", "dimension", "parameters"}
    (result,) = report["results"]
    assert (result["ratio"], result["objective"], result["allocation"]) == (0.3, "kl", "measured_kl")
    assert abs(result["realized_ratio"] - 0.3) < 0.02
    assert result["parameters"] < report["dense"]["parameters"]
    assert set(result["removed"]) == {unit["name"] for unit in report["units"]}
    assert 1 <= result["epochs"] <= 2
    for name in ("perplexity", "perplexity_init", "perplexity_init_uniform", "kl_joint", "kl_sum_of_isolated"):
        assert result[name] > 0
    assert (folder / "output" / "report.md").read_text().startswith("# ")
    for plot in ("kl_curves", "retained_ranks"):
        assert (folder / "output" / "plots" / f"{plot}.png").stat().st_size > 1000


def test_the_checkpoint_is_the_model_that_was_measured(first: dict[str, Any], folder: Path) -> None:
    checkpoint = folder / "output" / "checkpoints" / "0.3-kl"
    assert Path(first["results"][0]["checkpoint"]) == checkpoint
    model = load_compressed(checkpoint)
    assert sum(p.numel() for p in model.parameters()) == first["results"][0]["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("alpha", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tokenizer.decode(ids[0, -4:]) == first["results"][0]["continuation"]


def test_the_checkpoint_has_a_card_with_the_report_s_figures(
    first: dict[str, Any], folder: Path, tiny_model: Path
) -> None:
    checkpoint, (result,) = folder / "output" / "checkpoints" / "0.3-kl", first["results"]
    card, text = json.loads((checkpoint / "card.json").read_text()), (checkpoint / "README.md").read_text()
    assert card["figures"] == {
        "dense": first["dense"]["perplexity"],
        "untrained_uniform": result["perplexity_init_uniform"],
        "untrained": result["perplexity_init"],
        "trained": result["perplexity"],
    }
    for name in ("realized_ratio", "kl_joint", "kl_sum_of_isolated", "allocation", "epochs", "best_epoch"):
        assert card[name] == result[name]
    assert card["target"] == {"ratio": 0.3, "objective": "kl"}
    assert card["compressed"]["parameters"] == result["parameters"]
    assert card["dense"]["parameters"] == first["dense"]["parameters"]
    assert {unit["name"]: unit["dimension"] - unit["rank"] for unit in card["units"]} == result["removed"]
    calibrated = next(stage["key"] for stage in first["stages"] if stage["label"] == "calibrate training")
    manifest = json.loads((folder / "store" / "manifest" / "calibrate" / f"{calibrated}.json").read_text())
    assert card["calibration"] == {"amount": "16 sequences of 32 tokens", "digest": manifest["digest"]}
    assert (card["base_model"]["name"], card["base_model"]["revision"]) == (tiny_model.name, None)
    assert text.startswith(f"---\nbase_model: {tiny_model.name}\nlicense: unknown\n")
    assert f"|                  LSP |     {result['perplexity']:.2f} |" in text


def test_the_grid_opens_with_xarray(first: dict[str, Any]) -> None:
    grid = xarray.open_zarr(first["grid"])
    assert set(grid["status"].values.ravel().tolist()) == {1, 2}
    assert bool((grid["kl"].values[grid["status"].values == 1] > -1e-6).all())  # float32 rounds below 0


def test_a_second_run_is_all_cached(first: dict[str, Any], folder: Path, tiny_config: Make) -> None:
    cards = [folder / "output" / "checkpoints" / "0.3-kl" / name for name in ("card.json", "README.md")]
    before = [path.read_bytes() for path in cards]
    second = compress(tiny_config(folder))
    assert [path.read_bytes() for path in cards] == before
    assert states(second) == {"Cached"}
    assert second["results"] == first["results"]


def test_another_ratio_reruns_nothing_left_of_allocate(
    first: dict[str, Any], folder: Path, tiny_config: Make, tmp_path: Path
) -> None:
    report = compress(tiny_config(folder, targets=[{"ratio": 0.5, "objective": "kl"}], output=tmp_path))
    assert states(report, *LEFT_OF_ALLOCATE) == {"Cached"}
    assert states(report, "merge") == {"Completed"}
    allocations = {stage["label"]: stage["state"] for stage in report["stages"] if stage["name"] == "allocate"}
    assert set(allocations.values()) == {"Completed"}


def test_another_objective_reruns_nothing_left_of_train(
    first: dict[str, Any], folder: Path, tiny_config: Make, tmp_path: Path
) -> None:
    report = compress(tiny_config(folder, targets=[{"ratio": 0.3, "objective": "task"}], output=tmp_path))
    assert states(report, *LEFT_OF_TRAIN) == {"Cached"}
    assert states(report, "train", "merge") == {"Completed"}


def test_what_cannot_change_the_result_changes_no_key(
    first: dict[str, Any], folder: Path, tiny_config: Make, tmp_path: Path
) -> None:
    report = compress(tiny_config(folder, micro_batch=3, teacher_cache_gib=0, output=tmp_path))
    assert states(report) == {"Cached"}


def test_a_damaged_artifact_is_computed_again(first: dict[str, Any], folder: Path, tiny_config: Make) -> None:
    store = folder / "store"
    merged = next(stage["key"] for stage in first["stages"] if stage["name"] == "merge")
    digest = json.loads((store / "manifest" / "merge" / f"{merged}.json").read_text())["digest"]
    (store / "payload" / digest / "model.safetensors").write_bytes(b"cut short")
    report = compress(tiny_config(folder))
    assert [stage["name"] for stage in report["stages"] if stage["state"] == "Completed"] == ["merge"]
    assert report["results"] == first["results"]


class Killed(BaseException):
    """Ends a run where a kill would."""


def test_a_killed_measurement_continues_at_its_first_unmeasured_row(
    folder: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, allocation={"sequences": 2})
    written: list[int] = []
    write_row = KLGrid.write_row

    def killed_at_the_fourth(self: KLGrid, unit: int, *row: Any) -> None:
        if len(written) == 3:
            raise Killed
        written.append(unit)
        write_row(self, unit, *row)

    monkeypatch.setattr(KLGrid, "write_row", killed_at_the_fourth)
    with pytest.raises(Killed):
        compress(config)
    assert written == [0, 1, 2]

    def counted(self: KLGrid, unit: int, *row: Any) -> None:
        written.append(unit)
        write_row(self, unit, *row)

    monkeypatch.setattr(KLGrid, "write_row", counted)
    report = compress(config)
    assert written == list(range(len(report["units"])))
    assert states(report, "calibrate", "gather", "bases") == {"Cached"}
    assert states(report, "measure") == {"Completed"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": [{"ratio": 0.97}]}, "the largest that can is 0.8"),
        ({"calibration": {"sequences": 16, "sequence_length": 128}}, "exceeds the 64 positions"),
        ({"discovery": {"exclude": ["*"]}}, "no targetable layer"),
        ({"model": {"name_or_path": "/no/such/model"}}, "there is no such folder"),
        ({"store": "/proc/store"}, "cannot be written"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(
    tiny_config: Make, tiny_text: dict[str, Path], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    if "calibration" in changes:
        changes["calibration"]["text"] = {"path": tiny_text["train"]}
    with pytest.raises(ValueError, match=said):
        compress(tiny_config(tmp_path, **changes))
    assert not (tmp_path / "store" / "manifest").exists()


def test_too_little_text_says_how_much_there_is(tiny_config: Make, tiny_text: dict[str, Path], tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, calibration={"text": {"path": tiny_text["train"]}, "sequences": 5000, "sequence_length": 32}
    )
    with pytest.raises(ValueError, match=r"gives \d+ calibration sequences of 32 tokens, 5000 are asked for"):
        compress(config)


def test_memory_and_speed_are_reported(first: dict[str, Any], tiny_config: Make, folder: Path) -> None:
    """On the store of the first run: decoding is timed, and what is stated is that of the config alone."""
    config = tiny_config(folder, output=folder / "timed", store=str(folder / "store"))
    evaluation = config.evaluation.model_copy(update={"decode": DecodeConfig(contexts=(8,)), "device_gib": 7.0})
    report = compress(config.model_copy(update={"evaluation": evaluation}))
    (result,) = report["results"]
    assert {stage["name"] for stage in report["stages"] if stage["state"] == "Completed"} == {"decode", "report"}
    stated = {name: owner["efficiency"] for name, owner in (("dense", report["dense"]), ("ours", result))}
    assert stated["dense"]["parameters"] == report["dense"]["parameters"]
    assert stated["ours"]["parameters"] == result["parameters"]
    assert stated["ours"]["max_context_k_tokens"] > stated["dense"]["max_context_k_tokens"] > 0
    arms = result["speed"]["8"]
    assert {"dense", "untied", "ours", "ours-ready", "latent-rebuilt", "latent-rotated"} <= arms.keys()
    assert all(arm["tokens_per_second"] > 0 for arm in arms.values())
    assert arms["latent-rebuilt"]["cache_bytes"] < arms["dense"]["cache_bytes"]
    text = (folder / "timed" / "report.md").read_text()
    assert "## Memory and compute, from the shapes" in text
    assert "## Decoding, measured" in text
    assert (folder / "timed" / "plots" / "pareto.png").stat().st_size > 1000


def test_contexts_beyond_the_positions_are_refused_at_once(tiny_config: Make, tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    evaluation = config.evaluation.model_copy(update={"decode": DecodeConfig(contexts=(10_000_000,))})
    model = tmp_path / "opt"
    OPTForCausalLM(
        OPTConfig(vocab_size=400, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(model)
    AutoTokenizer.from_pretrained(config.model.name_or_path).save_pretrained(model)
    changed = config.model.model_copy(update={"name_or_path": str(model)})
    with pytest.raises(ValueError, match=r"evaluation\.decode: context 10000000: the model has 2048 learned positions"):
        compress(config.model_copy(update={"evaluation": evaluation, "model": changed}))
