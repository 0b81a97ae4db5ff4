import struct
from pathlib import Path
from typing import Any

import pytest

from lsp_core.allocation import UnitCurve
from lsp_core.units import Unit
from tasks.plots import plot_curves, plot_ranks
from tasks.report import markdown, side_by_side, table

PNG = b"\x89PNG\r\n\x1a\n"


def result(ratio: float, objective: str, **changes: Any) -> dict[str, Any]:
    return {
        "ratio": ratio,
        "objective": objective,
        "allocation": "measured_kl",
        "realized_ratio": ratio + 0.0004,
        "removed": {"model.layers.0.mlp.down_proj": 9},
        "kl_sum_of_isolated": 0.25,
        "kl_joint": 0.3125,
        "perplexity_init": 30.0,
        "perplexity_init_uniform": 44.0,
        "perplexity": 21.0 if objective == "kl" else 19.0,
        "parameters": 1234,
        "epochs": 4,
        "best_epoch": 2,
        "continuation_init": "and and and",
        "continuation": f"by {objective}",
    } | changes


@pytest.fixture
def content() -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "Once upon\na time",
        "dense": {"perplexity": 17.125, "parameters": 5678, "tokens": 4096, "continuation": "there was"},
        "units": [],
        "left_alone": {},
        "results": [result(0.3, "kl"), result(0.7, "kl"), result(0.7, "task")],
        "stages": [
            {"label": "train 0.7-kl", "state": "Cached", "seconds": 0.02, "key": "0123456789abcdef", "reason": None}
        ],
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_a_row_for_dense_and_each_result(content: dict[str, Any]) -> None:
    lines = table(content)
    assert len({len(line) for line in lines}) == 1  # aligned for people
    header = cells(lines[0])
    assert set(lines[1]) <= set("|-:")
    rows = [dict(zip(header, cells(line), strict=True)) for line in lines[2:]]
    assert (rows[0]["removed"], rows[0]["parameters"], rows[0]["LSP"]) == ("dense", "5,678", "17.12")
    assert rows[1] == {
        "removed": "30%",
        "realized": "30.04%",
        "parameters": "1,234",
        "KL isolated": "0.250",
        "KL joint": "0.312",
        "NoLSP uniform": "44.00",
        "NoLSP": "30.00",
        "LSP": "21.00",
        "objective": "kl",
        "epochs": "4 (best 2)",
    }
    assert [row["LSP"] for row in rows[1:]] == ["21.00", "21.00", "19.00"]


def test_without_a_grid_there_are_no_isolated_divergences(content: dict[str, Any]) -> None:
    content["results"] = [result(0.5, "kl", allocation="uniform_rank", kl_sum_of_isolated=None)]
    assert cells(table(content)[-1])[3] == ""
    assert "kl_curves.png" not in markdown(content)


def test_the_continuations_stand_side_by_side(content: dict[str, Any]) -> None:
    assert side_by_side(content, 0.7) == (
        "prompt\n    Once upon\n    a time\n\n"
        "dense\n    there was\n\n"
        "NoLSP at 70%\n    and and and\n\n"
        "LSP at 70%\n    by kl\n\n"
        "LSP-T at 70%\n    by task"
    )


def test_the_report_for_people_holds_everything(content: dict[str, Any]) -> None:
    text = markdown(content)
    assert text.startswith("# tiny, compressed\n\nDense: 5,678 parameters, perplexity 17.12 on 4096 test tokens.")
    assert "\n".join(table(content)) in text
    assert side_by_side(content, 0.7) in text
    assert "![retained ranks](plots/retained_ranks.png)" in text
    assert "![KL curves](plots/kl_curves.png)" in text
    assert "| train 0.7-kl | Cached |     0.0 | 0123456789ab |" in text
    assert "Zero-shot" not in text


def test_without_a_prompt_nothing_is_continued(content: dict[str, Any]) -> None:
    assert "continued" not in markdown(content | {"prompt": None})


def test_the_accuracies_of_the_tasks(content: dict[str, Any]) -> None:
    content["dense"]["tasks"] = {"easy": {"acc": 0.5, "acc_norm": 0.625}, "written": {"exact_match": 0.25}}
    tasks = {"easy": {"acc": 0.375, "acc_norm": 0.5}, "written": {"exact_match": 0.125}}
    content["results"] = [result(0.7, "task", tasks_init=content["dense"]["tasks"], tasks=tasks)]
    lines = markdown(content).split("## Zero-shot accuracy, %\n\n")[1].split("\n\n")[0].split("\n")
    assert [cells(line) for line in (lines[0], *lines[2:])] == [
        ["model", "removed", "easy", "written"],
        ["dense", "", "50.0", ""],  # a task without an accuracy has none here
        ["NoLSP", "70%", "50.0", ""],
        ["LSP-T", "70%", "37.5", ""],
    ]


@pytest.fixture
def classified() -> dict[str, Any]:
    """Returns the report of an image classifier."""
    probes = {"flowers": {"acc": 0.75, "converged": True}}
    dense = {"accuracy": 0.9375, "similarity": 1.0, "parameters": 5678, "examples": 640, "transfer": probes}
    accuracies = {"accuracy_init": 0.5, "accuracy_init_uniform": 0.25, "accuracy": 0.875}
    compressed = result(0.5, "kl", **accuracies, transfer_init={"flowers": {"acc": 0.5}}, transfer=probes)
    return {"model": "vit", "prompt": None, "dense": dense, "units": [], "left_alone": {}, "results": [compressed]}


def test_a_classifier_is_judged_by_its_accuracy(classified: dict[str, Any]) -> None:
    lines = table(classified)
    rows = [dict(zip(cells(lines[0]), cells(line), strict=True)) for line in lines[2:]]
    assert rows[0]["LSP"] == "93.75%"
    assert [rows[1][name] for name in ("NoLSP uniform", "NoLSP", "LSP")] == ["25.00%", "50.00%", "87.50%"]
    text = markdown(classified)
    assert "Dense: 5,678 parameters, accuracy 93.75% on 640 test examples." in text
    assert "LSP-T on the labels (task). Accuracy is on the test images; KL, in nats per image, is" in text
    lines = text.split("## Transfer accuracy, %\n\n")[1].split("\n\n")[0].rstrip().split("\n")
    assert [cells(line) for line in lines[2:]] == [
        ["dense", "", "75.0"],
        ["NoLSP", "50%", "50.0"],
        ["LSP", "50%", "75.0"],
    ]


def test_an_evaluation_without_a_metric_is_refused(classified: dict[str, Any]) -> None:
    classified["dense"] = {"parameters": 5678, "loss": 3.0}
    with pytest.raises(ValueError, match="parameters, loss has no metric: one of perplexity, accuracy, similarity is"):
        table(classified)


def test_several_seeds_are_a_row_with_mean_and_deviation(content: dict[str, Any]) -> None:
    seeded = [result(0.7, "kl", seed=0), result(0.7, "kl", seed=1, perplexity=22.0, best_epoch=3, realized_ratio=0.7)]
    content |= {"seeds": [0, 1], "results": seeded}
    (row,) = (dict(zip(cells(table(content)[0]), cells(line), strict=True)) for line in table(content)[3:])
    assert (row["LSP"], row["NoLSP"], row["realized"]) == ("21.50 ± 0.71", "30.00 ± 0.00", "70.02% ± 0.03%")
    assert row["epochs"] == "4 (best 2), 4 (best 3)"
    text = markdown(content)
    assert text.count("LSP at 70%\n    by kl") == 1  # the first seed's
    for seed in (0, 1):
        assert f"![KL curves, seed {seed}](plots/seed-{seed}/kl_curves.png)" in text


def test_the_table_of_a_sweep(content: dict[str, Any]) -> None:
    sweep = [
        {"learning_rate": 1e-3, "best_epoch": 2, "validation": 20.5},
        {"learning_rate": 1e-4, "best_epoch": 4, "validation": 19.25},
    ]
    content["results"] = [result(0.7, "kl", learning_rate=1e-4, validated_on="perplexity", sweep=sweep)]
    assert cells(table(content)[-1])[-2:] == ["4 (best 2)", "0.0001"]
    lines = markdown(content).split("## Learning rates\n\n")[1].split("\n\n")[0].split("\n")
    assert [cells(line) for line in (lines[0], *lines[2:])] == [
        ["removed", "objective", "rate", "validated on", "validation", "best epoch", ""],
        ["70%", "kl", "0.001", "perplexity", "20.5", "2", ""],
        ["70%", "kl", "0.0001", "perplexity", "19.25", "4", "kept"],
    ]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(PNG)
    assert data.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def unit(kind: str, block: int) -> Unit:
    name = f"model.layers.{block}.{kind}"
    return Unit(name=name, side="input", members=(name,), dimension=40, others=(24,), block=block, roles=("",))


def test_the_plots_are_pictures(tmp_path: Path) -> None:
    units = [unit(kind, block) for block in range(3) for kind in ("o_proj", "up_proj", "down_proj", "q_proj")]
    counts = (10, 20, 30)
    curves = [UnitCurve(unit=u, counts=counts, kl=(0.01 * (1 + u.block), 0.1, 1.0)) for u in units]
    plot_curves(curves, tmp_path / "plots" / "curves.png")
    width, height = png_size(tmp_path / "plots" / "curves.png")  # 4 panels: two rows of 3
    assert 1000 < width < 2000
    assert 500 < height < 1000
    plot_ranks(units, {"50% removed": {units[0].name: 20}}, tmp_path / "ranks.png")
    width, height = png_size(tmp_path / "ranks.png")  # one panel
    assert 300 < width < 700
    assert 250 < height < 600


def test_a_plot_is_the_same_file_twice(tmp_path: Path) -> None:
    units = [unit("o_proj", 0)]
    for name in ("a.png", "b.png"):
        plot_ranks(units, {"50% removed": {}}, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_curve_without_a_measured_point_and_one_below_zero_are_drawn(tmp_path: Path) -> None:
    curves = [
        UnitCurve(unit=unit("o_proj", 0), counts=(), kl=()),
        UnitCurve(unit=unit("o_proj", 1), counts=(20, 30), kl=(-1e-9, 0.5)),  # rounding, on a logarithmic axis
    ]
    plot_curves(curves, tmp_path / "curves.png")
    assert png_size(tmp_path / "curves.png")[0] > 300
