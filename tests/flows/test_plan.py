"""A plan says what a run will do, without doing any of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import flows.plan
from flows.cli import main
from flows.compress import compress
from flows.config import CompressConfig
from flows.estimates import Estimates
from flows.graph import build
from flows.plan import Planner, plan
from flows.prepared import prepare
from tasks.places import open_store

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finished")
    return folder, compress(tiny_config(folder))


def states(content: dict[str, Any]) -> dict[str, str]:
    return {step["label"]: step["state"] for step in content["stages"]}


def written(config: CompressConfig, folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(path)


def test_a_new_store_holds_nothing_and_stays_away(tiny_config: Make, tmp_path: Path) -> None:
    content = plan(tiny_config(tmp_path))
    assert list(tmp_path.iterdir()) == []
    first = {label for label, state in states(content).items() if state == "miss"}
    assert first == {f"calibrate {name}" for name in ("training", "validation", "allocation", "test")}
    assert set(states(content).values()) == {"miss", "unknown"}
    reasons = {step["label"]: step["reason"] for step in content["stages"]}
    assert reasons["calibrate test"] == "none like it in the store"
    assert reasons["gather"] == "unknown until calibrate training"
    assert reasons["measure"] == "unknown until calibrate training, calibrate allocation"
    for step in content["stages"]:
        assert step["written_bytes"] > 0
        assert step["seconds"] >= 0
    heavy = [step for step in content["stages"] if step["label"] in ("gather", "measure", "train 0.3-kl", "bases")]
    assert all(step["flops"] > 1e6 and step["peak_bytes"] > 1e5 and step["read_bytes"] > 1e4 for step in heavy)
    assert content["fits"]
    assert content["flops"] == sum(step["flops"] for step in content["stages"])


def test_after_a_run_everything_is_a_hit_and_no_rate_is_measured(
    finished: tuple[Path, dict[str, Any]], tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = finished
    monkeypatch.setattr(flows.plan, "device_rates", lambda *_, **__: pytest.fail("a measurement"))
    content = plan(tiny_config(folder))
    assert set(states(content).values()) == {"hit"}
    assert {step["label"]: step["key"] for step in content["stages"]} == {
        stage["label"]: stage["key"] for stage in report["stages"]
    }
    assert (content["seconds"], content["flops"], content["rates"]) == (0, 0, None)


def test_a_run_does_what_its_plan_says(
    finished: tuple[Path, dict[str, Any]], tiny_config: Make, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished[0] / "store", store)
    config = tiny_config(tmp_path, targets=[{"ratio": 0.4, "objective": "kl"}])
    content = plan(config)
    reasons = {step["label"]: step["reason"] for step in content["stages"] if step["state"] == "miss"}
    assert reasons == {"allocate 0.4": "ratio 0.3 → 0.4", "allocate 0.4 uniform": "ratio 0.3 → 0.4"}
    report = compress(config)
    computed = {stage["label"]: stage["reason"] for stage in report["stages"] if stage["state"] == "Completed"}
    assert set(computed) == {label for label, state in states(content).items() if state != "hit"}
    assert {label: computed[label] for label in reasons} == reasons
    assert "allocation changed" in computed["train 0.4-kl"]
    assert set(states(plan(config)).values()) == {"hit"}


@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_model_config_alone_gives_sizes_time_and_memory(
    named: str, tiny_config: Make, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny_model / "config.json", folder)
    place = folder if named == "folder" else folder / "config.json"
    content = plan(tiny_config(tmp_path, model={"name_or_path": str(place)}))
    reasons = {step["label"]: step["reason"] for step in content["stages"]}
    assert reasons["calibrate training"] == f"unknown until the tokenizer of {place} is there"
    assert set(states(content).values()) == {"unknown"}
    assert content["parameters"] > 10_000
    assert all(step["written_bytes"] > 0 for step in content["stages"])
    assert content["peak_bytes"] > 1e5


def test_what_cannot_fit_has_an_exit_status_of_its_own(
    tiny_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tiny_config(tmp_path), tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["plan", path, "--device-gib", "0.00001", "--json"])
    assert exit_.value.code == 3
    content = json.loads(capsys.readouterr().out)
    assert not content["fits"]
    assert content["device_gib"] == pytest.approx(1e-5, rel=0.01)
    with pytest.raises(SystemExit):
        main(["plan", path, "--device-gib", "0.00001"])
    assert "DOES NOT FIT: " in capsys.readouterr().out


def test_what_does_not_fit_is_told_which_setting_makes_it_fit(
    tiny_config: Make, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    given = json.loads((tiny_model / "config.json").read_text()) | {"num_hidden_layers": 8, "layer_types": None}
    path.write_text(json.dumps(given))  # of two blocks, two slots hold all there is
    prepared = replace(prepare(tiny_config(tmp_path, model={"name_or_path": str(path)}), partly=True), device="cuda")
    store = open_store(prepared.config.store, verify=False, writable=False)
    estimates = Estimates(prepared, store)
    planner = Planner(store=store, estimates=estimates)
    build(planner, prepared)
    peaks = {step.label: cost.peak_bytes for step, cost in planner.costs if cost is not None}
    for label in ("gather", "bases", "measure", "train teacher", "evaluate dense", "evaluate 0.3-kl"):
        assert estimates.remedy(*planner.asked[label], peaks[label] - 1) == "set offload: true"
        assert estimates.remedy(*planner.asked[label], 100) is None
    train = estimates.remedy(*planner.asked["train 0.3-kl"], peaks["train 0.3-kl"] - 1)
    assert train is not None
    assert train.startswith("set training.sharding: sharded and training.num_processes: ")
    assert estimates.remedy(*planner.asked["train 0.3-kl"], 100) is None
    assert estimates.remedy(*planner.asked["merge 0.3-kl"], 0) is None


def test_a_plan_for_people_states_the_rates_it_rests_on(
    tiny_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", written(tiny_config(tmp_path), tmp_path), "--targets", '[{"ratio": 0.5}]']) == 0
    out = capsys.readouterr().out
    assert "train 0.5-kl" in out
    assert "times by the rates" in out
    assert "at most" in out


def test_a_mistake_is_one_line(tiny_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path, model={"name_or_path": "/no/such/model"})
    assert main(["plan", written(config, tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "error: model.name_or_path='/no/such/model': there is no such folder on this machine; name one that is, "
        "or a hub id\n"
    )
