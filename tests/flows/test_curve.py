"""The curve of ratios against direct calls, what it runs, and what it hands out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli import main
from flows.config import CompressConfig
from flows.curve import measure_curve, summary
from lsp_core.allocation import greedy, largest_ratio
from lsp_core.fit import GIB, checkpoint_bytes
from lsp_core.sensitivity import Sensitivity
from storage.manifest import ArtifactRef
from storage.store import Store
from tasks.allocate import read_curves
from tasks.artifacts import read_bases, read_tokens
from tasks.caching import Runtime, Work
from tasks.curve import reach
from tasks.models import find_model, load_model
from tasks.places import open_store

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> tuple[CompressConfig, dict[str, Any]]:
    config = tiny_config(tmp_path_factory.mktemp("curve"), targets=[{"ratio": 0.99}])  # out of reach, and left aside
    return config, measure_curve(config, 5)


def only(store: Store, kind: str) -> ArtifactRef:
    """Returns the one artifact of a kind that is not the training or test set."""
    (key,) = (name.removesuffix(".json") for name in store.files.infos(f"manifest/{kind}"))
    found = store.find(kind, key)
    assert found is not None
    return found


def test_every_point_is_what_direct_calls_give(drawn: tuple[CompressConfig, dict[str, Any]], tmp_path: Path) -> None:
    config, content = drawn
    store = open_store(config.store, verify=False, writable=False)
    work = Work(store=store, label="", output=tmp_path, scratch=tmp_path, runtime=Runtime())
    units, tensors = read_bases(work, only(store, "bases"))
    curves = read_curves(work, only(store, "measure"), units)
    model = load_model(find_model(config.model.name_or_path))
    lineage = store.manifest("curve", only(store, "curve").key).lineage
    tokens = store.find("calibrate", lineage.inputs["tokens"].key or "")
    assert tokens is not None
    sensitivity = Sensitivity(model, units, tensors, read_tokens(work, tokens), micro_batch=3)
    largest = largest_ratio(curves)
    assert content["largest_ratio"] == largest
    assert content["parameters"] == model.num_parameters()
    for index, row in enumerate(content["points"], 1):
        chosen = greedy(curves, largest * (index / 5))
        assert row["realized_ratio"] == chosen.ratio
        assert row["kl_sum_of_isolated"] == chosen.cost
        # float32, another micro-batch: rounding of each divergence by 1e-6 nats at most
        assert row["kl_joint"] == pytest.approx(sensitivity.joint(chosen.removed), rel=1e-4, abs=1e-6)
        assert row["parameters"] == content["parameters"] - chosen.saved
        assert row["gib"] * GIB == checkpoint_bytes(model, units, chosen.removed, dtype=model.dtype)
    assert content["points"][-1]["realized_ratio"] == pytest.approx(largest, rel=1e-12)


def test_nothing_is_trained_and_a_second_time_nothing_is_run(
    drawn: tuple[CompressConfig, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, content = drawn
    store = open_store(config.store, verify=False, writable=False)
    kinds = {name.split("/")[0] for name in store.files.infos("manifest")}
    assert kinds == {"calibrate", "gather", "bases", "measure", "curve"}
    monkeypatch.setattr("tasks.curve.open_sensitivity", lambda *_: pytest.fail("a measurement"))
    assert measure_curve(config, 5) == content


def test_what_it_hands_out(drawn: tuple[CompressConfig, dict[str, Any]]) -> None:
    config, content = drawn
    assert json.loads((config.output / "curve.json").read_text()) == content
    assert (config.output / "plots" / "curve.png").read_bytes().startswith(b"\x89PNG")
    text = (config.output / "curve.md").read_text()
    assert content["summary"] in text
    assert text.count("%") == 5
    assert all(f"{row['realized_ratio']:.2%}" in text for row in content["points"])


@pytest.mark.parametrize("method", ["fisher", "uniform_rank"])
def test_other_methods_from_the_command_line(
    drawn: tuple[CompressConfig, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    config, _ = drawn
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    options = ["--points", "3", "--allocation.method", method, "--output", str(tmp_path / "output")]
    assert main(["curve", str(file), *options]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert any(line.startswith("joint KL stays below 0.1 nats up to a ratio of 0.") for line in lines)
    assert lines[-1] == f"table, plot and JSON: {tmp_path / 'output'}"
    assert len([line for line in lines if "%" in line]) == 3
    assert main(["curve", str(file), *options, "--json"]) == 0
    content = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert content["method"] == method
    assert all((row["kl_sum_of_isolated"] is None) == (method == "uniform_rank") for row in content["points"])


def rows(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"realized_ratio": ratio, "kl_joint": kl} for ratio, kl in pairs]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (rows((0.2, 0.05), (0.4, 0.15), (0.6, 0.01)), 0.3),  # the first crossing counts
        (rows((0.2, 0.4), (0.4, 0.5)), 0.05),  # from the dense model on
        (rows((0.2, 0.1), (0.4, 0.2)), 0.2),  # the bound itself is kept
        (rows((0.2, 0.01), (0.4, 0.09)), 0.4),
    ],
)
def test_the_reach_is_the_first_crossing(points: list[dict[str, Any]], expected: float) -> None:
    assert reach(points, 0.1) == pytest.approx(expected, rel=1e-12)


def test_the_summary_says_where_the_curve_ends() -> None:
    assert summary({"points": rows((0.2, 0.05), (0.4, 0.15))}) == "joint KL stays below 0.1 nats up to a ratio of 0.30"
    assert summary({"points": rows((0.2, 0.05), (0.4, 0.09))}).endswith("0.40, the largest that can be reached")
