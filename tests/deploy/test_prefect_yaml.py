"""The deployments: read by Prefect's own model, rendered by its own templating, validated by the flows themselves."""

import asyncio
import json
import zoneinfo
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel, RawScheduleConfig
from prefect.deployments.steps.utility import run_shell_script
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.importtools import import_object
from prefect.utilities.templating import apply_values, find_placeholders

from flows.config import CompressConfig
from tests.deploy.files import read

CONTENT = read("prefect.yaml")
BY_NAME = {deployment["name"]: deployment for deployment in CONTENT["deployments"]}
FLOWS = {"compress": "compress", "demo": "compress", "nightly": "compress", "evaluate": "evaluate"} | {
    "benchmark": "benchmark"
}
SCRIPT = "prefect.deployments.steps.run_shell_script"


@cache
def outputs(store: str | None = None, output: str | None = None) -> dict[str, Any]:
    """Returns what the build steps say in an environment with these two variables, run as Prefect runs them."""
    given = {"LSP_STORE": store or "", "LSP_OUTPUT": output or ""}
    said = {}
    for step in CONTENT["build"]:
        settings = {key: value for key, value in step[SCRIPT].items() if key != "id"}
        said[step[SCRIPT]["id"]] = asyncio.run(run_shell_script(**settings, env=given))
    return said


def parameters(name: str, **given: str) -> dict[str, Any]:
    rendered: Any = apply_values(BY_NAME[name]["parameters"], outputs(**given))
    return rendered


def test_prefect_reads_the_file_and_knows_every_key() -> None:
    model = PrefectYamlModel.model_validate(CONTENT)
    assert [deployment.name for deployment in model.deployments] == list(FLOWS)
    assert CONTENT.keys() <= PrefectYamlModel.model_fields.keys() | {"prefect-version", "definitions"}
    for deployment in CONTENT["deployments"]:
        assert deployment.keys() <= DeploymentConfig.model_fields.keys(), "Prefect ignores what it does not know"
        assert deployment["description"]
        assert "lsp" in deployment["tags"], "deploy/automations.yaml goes by it"
        assert deployment["concurrency_limit"]["limit"] >= 1


@pytest.mark.parametrize("name", FLOWS)
def test_an_entrypoint_is_a_module_with_the_flow_of_that_name(name: str) -> None:
    entrypoint = BY_NAME[name]["entrypoint"]
    assert ".py" not in entrypoint, "a file would put its folder on sys.path"
    assert load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False).name == FLOWS[name]


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("given", [{}, {"store": "s3://bucket/lsp", "output": "/var/lib/lsp/runs"}])
def test_the_flow_takes_the_parameters(name: str, given: dict[str, str]) -> None:
    rendered = parameters(name, **given)
    assert not find_placeholders(rendered)
    assert len(json.dumps(rendered)) < 512 * 1024, "Prefect's limit"
    flow = load_flow_from_entrypoint(BY_NAME[name]["entrypoint"], use_placeholder_flow=False)
    config = flow.validate_parameters(rendered)["config"]
    assert str(config.output).startswith(given.get("output", "runs") + "/")
    if name != "benchmark":
        assert config.store == given.get("store", ".lsp")


def test_two_deployments_share_no_output_folder() -> None:
    folders = [parameters(name)["config"]["output"] for name in FLOWS]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", FLOWS)
def test_the_pull_steps_are_explicit_and_go_to_the_checkout(name: str) -> None:
    steps = BY_NAME[name].get("pull", CONTENT["pull"])
    assert [next(iter(step)) for step in steps][:2] == [SCRIPT, "prefect.deployments.steps.set_working_directory"]
    assert steps[:2] == CONTENT["pull"]
    for step in steps:
        ((function, settings),) = step.items()
        assert callable(import_object(function))
        assert not any("$" in found.name for found in find_placeholders(settings)), "Prefect would pin the deployer's"


def test_the_checkout_is_where_the_worker_says(tmp_path: Path) -> None:
    settings = {key: value for key, value in CONTENT["pull"][0][SCRIPT].items() if key != "id"}
    assert asyncio.run(run_shell_script(**settings, env={"LSP_HOME": str(tmp_path)}))["stdout"] == str(tmp_path)
    with pytest.raises(RuntimeError, match="nowhere"):
        asyncio.run(run_shell_script(**settings, env={"LSP_HOME": str(tmp_path / "nowhere")}))
    assert "${LSP_HOME:-/opt/lsp}" in settings["script"]


def test_the_demo_reads_the_text_that_its_pull_step_writes(tmp_path: Path) -> None:
    ((function, settings),) = BY_NAME["demo"]["pull"][2].items()
    said = outputs(output=str(tmp_path))
    rendered: Any = apply_values(settings, said)
    written = import_object(function)(**rendered)
    config = CompressConfig.model_validate(parameters("demo", output=str(tmp_path))["config"])
    assert config.validation.text is not None
    read_by_it = [config.calibration.text.path, config.validation.text.path, config.evaluation.text.path]
    assert read_by_it == list(written.values())
    assert all(path.stat().st_size > 100_000 for path in written.values())


def test_the_schedule_is_there_and_does_not_start_by_itself() -> None:
    scheduled = {name: deployment["schedules"] for name, deployment in BY_NAME.items() if deployment.get("schedules")}
    assert list(scheduled) == ["nightly"]
    (schedule,) = (RawScheduleConfig.model_validate(one) for one in scheduled["nightly"])
    assert schedule.cron
    assert schedule.active is False
    assert schedule.slug, "without one a second deployment could not tell it from another"
    zoneinfo.ZoneInfo(schedule.timezone or "")


def test_the_work_pool_is_the_deployers_choice() -> None:
    for deployment in CONTENT["deployments"]:
        assert "name" not in deployment["work_pool"], "PREFECT_DEFAULT_WORK_POOL_NAME or --pool"
