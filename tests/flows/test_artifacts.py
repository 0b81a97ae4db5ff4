"""What a run shows in Prefect beside its log, of a real run and of one that is too large to show whole."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

import flows.artifacts
from flows.artifacts import ROWS, allocation_lines, chart, curve_lines, plan_lines, show_markdown, stage_rows
from flows.compress import compress
from flows.config import CompressConfig
from flows.plan import Step
from storage.grid import SKIPPED, KLGrid
from tests.flows.processes import payload

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def first(folder: Path, tiny_config: Make) -> dict[str, Any]:
    return compress(tiny_config(folder))


def shown(run: str) -> dict[str, Any]:
    """Returns what a flow run shows, by key."""
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(run)]))
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=wanted)
    return {
        artifact.key: json.loads(artifact.data) if artifact.type == "table" else artifact.data for artifact in artifacts
    }


def cells(markdown: str) -> list[list[str]]:
    """Returns the rows of a table, without the header."""
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def test_a_run_shows_plan_results_ranks_curves_stages_and_files(first: dict[str, Any], folder: Path) -> None:
    artifacts = shown(first["run"])
    keys = {"plan", "compression", "allocation", "kl-curves", "stages", "files"}
    assert keys == {key for key in artifacts if not key.startswith("progress-")}
    planned = {row[0]: row[1:] for row in cells(artifacts["plan"])}
    assert planned.keys() == {stage["label"] for stage in first["stages"]}
    assert planned["calibrate test"][0::2] == ["miss", "none like it in the store"]
    assert planned["gather"][0::2] == ["unknown", "unknown until calibrate training"]
    assert f"{first['results'][0]['perplexity']:.2f}" in artifacts["compression"]
    assert [row["stage"] for row in artifacts["stages"]] == [stage["label"] for stage in first["stages"]]
    assert {row["state"] for row in artifacts["stages"]} == {"Completed"}
    where = dict(cells(artifacts["files"]))
    assert where["checkpoint"] == str(folder / "output" / "checkpoints" / "0.3-kl")
    assert where["store"] == str(folder / "store")
    assert all(Path(path).exists() for path in where.values())


def test_the_plan_of_a_second_run_says_what_is_there_and_what_changed(
    first: dict[str, Any], folder: Path, tiny_config: Make, tmp_path: Path
) -> None:
    again = compress(tiny_config(folder, targets=[{"ratio": 0.4}], output=tmp_path))
    planned = {row[0]: row[1:] for row in cells(shown(again["run"])["plan"])}
    assert planned["measure"][0] == "hit"
    assert planned["allocate 0.4"][0::2] == ["miss", "ratio 0.3 → 0.4"]
    assert planned["train 0.4-kl"][0] == "unknown"
    states = {row["stage"]: row["state"] for row in shown(again["run"])["stages"]}
    assert (states["measure"], states["train 0.4-kl"]) == ("Cached", "Completed")


def test_the_ranks_shown_are_those_of_the_report(first: dict[str, Any]) -> None:
    (result,) = first["results"]
    rows = {row[0]: row for row in cells("\n".join(allocation_lines(first["units"], first["results"])))}
    for kind, row in rows.items():
        members = [unit for unit in first["units"] if re.sub(r"\.\d+\.", ".*.", unit["name"], count=1) == kind]
        kept = [1 - result["removed"][unit["name"]] / unit["dimension"] for unit in members]
        assert row[1:] == [
            str(len(members)),
            "30% kl",
            *(f"{value:.1%}" for value in (sum(kept) / len(kept), min(kept), max(kept))),
        ]
    assert sum(int(row[1]) for row in rows.values()) == len(first["units"])


def test_the_curves_shown_are_those_of_the_grid(first: dict[str, Any], folder: Path) -> None:
    grid = payload(folder / "store", "measure")
    data = KLGrid.open(str(grid)).read()
    rows = {row[0]: row[1:] for row in cells("\n".join(curve_lines(grid)))}
    names = [str(name) for name in data["unit"].values]
    kind = names[0].replace(".0.", ".*.")
    measured = [data["kl"].values[row] for row, name in enumerate(names) if name.replace(".1.", ".0.") == names[0]]
    assert rows[kind][0] == str(len(measured))
    last = sum(row[-1] for row in measured) / len(measured)
    assert float(rows[kind][-1]) == pytest.approx(last, rel=5e-3)  # three digits are shown
    skipped = data["status"].values[0] == SKIPPED
    assert [cell == "" for cell in rows[kind][1:]] == skipped.tolist()


def test_what_is_too_large_is_cut() -> None:
    steps = [Step(label=f"s{n}", key="k", state="hit" if n < 100 else "miss", reason="a | b") for n in range(130)]
    lines = plan_lines(steps)
    assert lines[0] == "Of 130 stages: 100 hit, 30 miss, 0 unknown."
    assert len(cells("\n".join(lines))) == ROWS
    assert lines[-1] == "... and 80 more"
    assert [row[1] for row in cells("\n".join(lines))].count("miss") == 30  # what will be computed comes first
    records = [
        {"label": f"s{n}", "state": "Cached" if n < 100 else "Completed", "seconds": 1.0, "key": "k", "reason": None}
        for n in range(130)
    ]
    assert [row["state"] for row in stage_rows(records)[:31]] == ["Completed"] * 30 + ["Cached"]
    units = [{"name": f"h.{n}.up", "dimension": 8, "block": n} for n in range(200)]
    lines = allocation_lines(units, [{"ratio": 0.5, "objective": "kl", "removed": {u["name"]: 2 for u in units}}])
    assert cells("\n".join(lines)) == [["h.*.up", "200", "50% kl", "75.0%", "75.0%", "75.0%"]]
    (drawn,) = [line for line in lines if line.strip().startswith("line [")]
    assert drawn.count("0.75") == 50


def test_a_chart_has_as_many_values_as_positions() -> None:
    lines = chart("KL", "removed, %", list(range(0, 100, 1)), {"a": [0.1] * 100, "b": [0.3] * 99 + [0.6]})
    assert lines[:2] == ["```mermaid", "xychart-beta"]
    axis, bounds, *drawn = [line.strip() for line in lines[3:7]]
    assert axis.startswith('x-axis "removed, %" [0, 2, 4,')
    assert bounds == "y-axis 0 --> 0.6"
    assert [line.count(",") for line in (axis, *drawn)] == [50, 49, 49]
    assert lines[-1] == "Lines, in this order: `a`, `b`"


def test_a_display_that_fails_ends_no_run(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise KeyError("units")

    show_markdown("allocation", broken, "ranks")
    assert "allocation cannot be shown in Prefect ('units')" in caplog.text

    def refused(*_: object, **__: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(flows.artifacts, "create_markdown_artifact", refused)
    show_markdown("plan", lambda: ["text"], "plan")
    assert "plan cannot be shown in Prefect (no server)" in caplog.text
