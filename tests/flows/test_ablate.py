"""An ablation: what its cells share, what it refuses, what it prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import cli
from flows.ablate import ablate, cells, print_ablation
from flows.compress import compress
from flows.config import CompressConfig

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]

AXES = {"init": ["whitened", "plain"], "tie": [True, False]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ablate")


@pytest.fixture(scope="module")
def crossed(folder: Path, tiny_config: Make) -> dict[str, Any]:
    return ablate(tiny_config(folder, ablate=AXES))


def test_there_is_a_row_for_each_combination(crossed: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "output" / "ablate.json").read_text()) == crossed
    assert crossed["axes"] == ["init", "tie"]
    rows = {(row["init"], row["tie"]): row for row in crossed["rows"]}
    assert len(rows) == len(crossed["rows"]) == 4
    for row in rows.values():
        assert (row["ratio"], row["objective"], row["kv_routing"]) == (0.3, "kl", "auto")
        assert row["allocation"] == "measured_kl"
        assert abs(row["realized_ratio"] - 0.3) < 0.02
        assert min(row["kl_joint"], row["perplexity_init"], row["perplexity"]) > 0
    assert len({row["kl_joint"] for row in rows.values()}) == 4  # every cell is another model


def test_what_cells_share_is_computed_once(crossed: dict[str, Any]) -> None:
    names = [stage["name"] for stage in crossed["stages"]]
    counts = {name: names.count(name) for name in names}
    assert counts == {
        "calibrate": 4,
        "gather": 2,  # by tie
        "bases": 4,  # by tie and init
        "measure": 4,
        "allocate": 4,
        "train": 5,  # and the dense outputs
        "merge": 4,
        "evaluate": 9,  # the dense model, and each cell before and after
    }
    assert len({stage["key"] for stage in crossed["stages"]}) == len(names)


def test_the_best_of_each_column_is_marked(crossed: dict[str, Any], folder: Path) -> None:
    for name in ("kl_joint", "perplexity_init", "perplexity"):
        least = min(row[name] for row in crossed["rows"])
        assert [name in row["best"] for row in crossed["rows"]] == [row[name] == least for row in crossed["rows"]]
    assert not any("realized_ratio" in row["best"] for row in crossed["rows"])
    text = (folder / "output" / "ablate.md").read_text()
    best = min(row["perplexity"] for row in crossed["rows"])
    assert text.count(f"**{best:.2f}**") >= 1
    realized = [row["realized_ratio"] for row in crossed["rows"]]
    apart = 100 * (max(realized) - min(realized))
    assert f"Realized ratios at 30%: {min(realized):.2%} to {max(realized):.2%}, {apart:.2f} points apart." in text
    assert (folder / "output" / "plots" / "ablate.png").stat().st_size > 1000


def test_the_cell_of_the_config_is_what_compress_makes(
    crossed: dict[str, Any], folder: Path, tiny_config: Make, tmp_path: Path
) -> None:
    report = compress(tiny_config(folder, output=tmp_path))
    computed = {stage["label"] for stage in report["stages"] if stage["state"] == "Completed"}
    uniform = {"allocate 0.3 uniform", "evaluate 0.3 untrained, uniform"}  # of no interest to an ablation
    assert computed == {*uniform, "report"}
    row = next(row for row in crossed["rows"] if row["init"] == "whitened" and row["tie"])
    for name in ("realized_ratio", "kl_joint", "perplexity_init", "perplexity", "parameters"):
        assert row[name] == report["results"][0][name]


def test_seeds_give_means_and_deviations(
    crossed: dict[str, Any], folder: Path, tiny_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {"allocation": ["uniform_parameters", "uniform_rank"], "objective": ["task"]}
    content = ablate(tiny_config(folder, ablate=axes, seeds=[0, 1], output=tmp_path))
    assert content["axes"] == ["allocation", "objective"]
    for row in content["rows"]:
        first, second = (one["perplexity"] for one in row["results"])
        assert first != second
        assert row["perplexity"] == pytest.approx((first + second) / 2, rel=1e-12)
        assert row["std"]["perplexity"] == pytest.approx(abs(first - second) / 2**0.5, rel=1e-9)
    drawn = [stage["label"] for stage in content["stages"] if stage["state"] == "Completed"]
    assert {label for label in drawn if label.startswith(("calibrate", "gather"))} == {
        "calibrate training seed 1",
        "calibrate validation seed 1",
        "calibrate allocation seed 1",
        "gather cell 1 seed 1",
    }
    print_ablation(content, as_json=False)
    row = content["rows"][0]
    assert f"{row['perplexity']:.2f} ± {row['std']['perplexity']:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            {"tie": [True, False], "kv_routing": ["auto", "input"]},
            r"1 of 4 cells combine them, the first is .*tie false",
        ),
        ({"init": ["plain"]}, "one cell is nothing to compare"),
        ({"ratio": [0.3, 0.97]}, r"ratio 97%: .*the largest that can is"),
    ],
)
def test_what_cannot_be_crossed_is_refused_before_anything_is_computed(
    tiny_config: Make, tmp_path: Path, axes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ablate(tiny_config(tmp_path, ablate=axes))
    assert list(tmp_path.iterdir()) == []


def test_cells_of_one_ratio_stand_side_by_side(tiny_config: Make, tmp_path: Path) -> None:
    axes = {"init": ["plain", "whitened"], "ratio": [0.3, 0.5], "objective": ["kl", "task"]}
    found = [
        (c.values["ratio"], c.values["init"], c.values["objective"]) for c in cells(tiny_config(tmp_path, ablate=axes))
    ]
    assert found == [(r, i, o) for r in (0.3, 0.5) for i in ("plain", "whitened") for o in ("kl", "task")]


def test_without_those_axes_the_targets_stay_as_they_are(tiny_config: Make, tmp_path: Path) -> None:
    targets = [{"ratio": 0.3, "epochs": 1}, {"ratio": 0.5, "objective": "task"}]
    found = cells(tiny_config(tmp_path, targets=targets, ablate={"init": ["plain", "whitened"]}))
    assert [c.config.targets[0].model_dump(exclude_unset=True) for c in found] == [*targets[:1] * 2, *targets[1:] * 2]


def test_the_command_line_names_axes_and_settings(
    tiny_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CompressConfig] = []
    monkeypatch.setattr(cli.Ablate, "cli_cmd", lambda self: seen.append(self.to_config()))
    config = tiny_config(tmp_path, ablate={"init": ["random"], "ratio": [0.2]})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    arguments = ["--init", "whitened", "--init", "plain", "--tie", "true", "--tie", "false", "--allocation", "fisher"]
    arguments += ["--kv-routing", "untied", "--objective", "task", "--training.epochs", "7", "--output", "elsewhere"]
    assert cli.main(["ablate", str(tmp_path / "config.yaml"), *arguments, "--seeds", "3"]) == 0
    axes = seen[0].ablate
    assert (axes.init, axes.tie, axes.allocation) == (("whitened", "plain"), (True, False), ("fisher",))
    assert (axes.kv_routing, axes.objective, axes.ratio) == (("untied",), ("task",), (0.2,))
    assert (seen[0].training.epochs, seen[0].training.batch_sequences, seen[0].seeds) == (7, 8, (3,))
    assert seen[0].output == Path("elsewhere")
    assert seen[0].calibration == config.calibration


def test_a_value_that_is_none_of_an_axis_is_one_line_and_exit_2(
    tiny_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny_config(tmp_path).model_dump(mode="json")))
    assert cli.main(["ablate", str(tmp_path / "config.yaml"), "--init", "best"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: init.0: Input should be 'whitened', 'plain' or 'random'")
    assert error.count("\n") == 1
