"""Targets given as a size or as a divergence, caps on single units, the Fisher's ranks, random bases: whole runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from flows.compress import compress
from flows.config import CompressConfig
from flows.plan import plan
from flows.prepared import prepare
from lsp_core.fit import GIB

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]


def stages_of(report: dict[str, Any]) -> dict[str, str]:
    return {stage["label"]: stage["state"] for stage in report["stages"]}


def size_of(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(tensor.numel() * tensor.element_size() for tensor in map(file.get_tensor, file.keys()))


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> tuple[CompressConfig, dict[str, Any]]:
    """A run to a size and to a divergence, and its report."""
    config = tiny_config(
        tmp_path_factory.mktemp("bound"),
        targets=[{"fit_gib": 1e-4}, {"max_kl": 0.05}, {"max_kl": 0.05, "objective": "task"}],
    )
    return config, compress(config)


def test_a_size_is_kept_to_the_byte(bound: tuple[CompressConfig, dict[str, Any]]) -> None:
    config, report = bound
    (result, *_) = report["results"]
    size = size_of(config.output / "checkpoints" / "fit0.0001GiB-kl")
    assert size <= 1e-4 * GIB
    assert size > 1e-4 * GIB - 4 * 200  # at most one rank of the widest unit below
    assert result["fit_gib"] == 1e-4
    assert result["ratio"] <= result["realized_ratio"]
    assert result["parameters"] * 4 == size


def test_a_divergence_is_kept_and_nearly_used_up(bound: tuple[CompressConfig, dict[str, Any]]) -> None:
    _, report = bound
    _, result, other = report["results"]
    assert result["kl_joint"] <= 0.05
    assert result["kl_joint"] > 0.02
    assert result["removed"] == other["removed"]
    assert result["ratio"] == result["realized_ratio"]
    labels = stages_of(report)
    assert {"allocate kl0.05", "allocate kl0.05 uniform", "merge kl0.05-kl", "merge kl0.05-task"} <= set(labels)


def test_what_a_divergence_decides_is_on_record(bound: tuple[CompressConfig, dict[str, Any]]) -> None:
    """Every ratio tried, within half a point of one that costs too much; each joint KL is that of the evaluation."""
    config, report = bound
    record = json.loads(artifact(config, report, "allocate kl0.05").read_text())
    tried = sorted(record["tried"], key=lambda step: step["ratio"])
    assert len(tried) <= 10
    within = [step for step in tried if step["kl_joint"] <= 0.05]
    beyond = [step for step in tried if step["kl_joint"] > 0.05]
    assert within[-1]["ratio"] < beyond[0]["ratio"] <= within[-1]["ratio"] + 0.005
    assert record["realized_ratio"] == within[-1]["realized_ratio"]
    assert record["kl_joint"] == within[-1]["kl_joint"]
    assert record["kl_joint"] == pytest.approx(report["results"][1]["kl_joint"], rel=1e-6)  # the same passes again
    uniform = json.loads(artifact(config, report, "allocate kl0.05 uniform").read_text())
    assert abs(uniform["realized_ratio"] - record["realized_ratio"]) < 0.05  # half a rank of each small unit
    assert uniform["method"] == "uniform_parameters"


def test_the_plan_of_it_is_all_hits(bound: tuple[CompressConfig, dict[str, Any]]) -> None:
    config, _ = bound
    assert {step["state"] for step in plan(config)["stages"]} == {"hit"}


def test_the_report_says_what_bounds_a_target(bound: tuple[CompressConfig, dict[str, Any]]) -> None:
    config, report = bound
    assert [result.get("max_kl") for result in report["results"]] == [None, 0.05, 0.05]
    assert (config.output / "report.md").read_text().count(f"{report['results'][1]['ratio']:.0%}") >= 2


def test_another_method_reuses_bases_and_is_planned(
    bound: tuple[CompressConfig, dict[str, Any]], tiny_config: Make
) -> None:
    """The Fisher's ranks differ from the measured ones, a plan knows their cost, and the caps hold for both methods."""
    config, _ = bound
    caps = {"min_rank": {"*o_proj": 20}, "keep_dense": ["*.0.*down_proj"]}
    changed = tiny_config(
        Path(config.store).parent,
        allocation={"sequences": 4, "method": "fisher", **caps},
        targets=[{"ratio": 0.3, "epochs": 1}],
    )
    steps = {step["label"]: step for step in plan(changed)["stages"]}
    assert steps["bases"]["state"] == "hit"
    assert steps["fisher"]["state"] == "miss"
    assert steps["fisher"]["flops"] > 1e6
    assert steps["fisher"]["peak_bytes"] > 1e5
    assert "measure" not in steps
    report = compress(changed)
    (result,) = report["results"]
    removed = result["removed"]
    assert result["allocation"] == "fisher"
    assert result["realized_ratio"] == pytest.approx(0.3, abs=0.01)
    assert result["kl_sum_of_isolated"] > 0
    assert removed["model.layers.0.mlp.down_proj"] == 0
    assert all(32 - count >= 20 for name, count in removed.items() if name.endswith("o_proj"))
    uniform = json.loads(artifact(changed, report, "allocate 0.3 uniform").read_text())["removed"]
    assert uniform["model.layers.0.mlp.down_proj"] == 0
    assert all(32 - count >= 20 for name, count in uniform.items() if name.endswith("o_proj"))


def artifact(config: CompressConfig, report: dict[str, Any], label: str) -> Path:
    """Returns the file of an allocation in the store."""
    from tasks.places import open_store

    store = open_store(config.store, verify=False, writable=False)
    (key,) = {stage["key"] for stage in report["stages"] if stage["label"] == label}
    found = store.find("allocate", key)
    assert found is not None
    return store.local(found) / "allocation.json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": [{"fit_gib": 1.0}]}, r"the dense model takes .* and fits into 1 GiB: nothing is to be done"),
        ({"targets": [{"fit_gib": 1e-6}]}, r"fit_gib 1e-06 cannot be reached: the smallest model takes .* GiB"),
        ({"targets": [{"ratio": 0.99}]}, r"ratio 0\.99 cannot be reached: the largest that can is 0\.\d+$"),
        (
            {"allocation": {"sequences": 4, "keep_dense": ["*mlp*"]}, "targets": [{"ratio": 0.5}]},
            r"ratio 0\.5 cannot be reached: the largest that can is 0\.\d+; min_rank and keep_dense cap it",
        ),
        (
            {"allocation": {"sequences": 4, "min_rank": {"*.up": 3}}},
            r"pattern '\*\.up' of the allocation matches no unit; the units are model\.layers\.0\.",
        ),
        ({"allocation": {"sequences": 4, "keep_dense": ["*"]}}, "leave nothing to remove"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    tiny_config: Make, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        prepare(tiny_config(tmp_path, **changes))
    assert not (tmp_path / "store").exists()


def test_a_divergence_that_nothing_meets_is_refused(
    bound: tuple[CompressConfig, dict[str, Any]], tiny_config: Make
) -> None:
    """Uniform ranks of the lightest ratios remove nothing at all, which is no answer either."""
    config, _ = bound
    changes = {"allocation": {"sequences": 4, "method": "uniform_rank"}, "targets": [{"max_kl": 1e-9}]}
    with pytest.raises(ValueError, match=r"max_kl 1e-09 cannot be met: removing \d.*%, the lightest allocation, costs"):
        compress(tiny_config(Path(config.store).parent, **changes))


def test_random_bases_are_a_miss_of_their_own_and_their_seed_counts(
    bound: tuple[CompressConfig, dict[str, Any]], tiny_config: Make
) -> None:
    config, _ = bound
    folder = Path(config.store).parent
    for seed, reason in ((0, "seed"), (1, "seed")):
        steps = {step["label"]: step for step in plan(tiny_config(folder, init="random", init_seed=seed))["stages"]}
        assert steps["bases"]["state"] == "miss"
        assert reason in steps["bases"]["reason"]
    steps = {step["label"]: step for step in plan(tiny_config(folder, init_seed=1))["stages"]}
    assert steps["bases"]["state"] == "hit"
