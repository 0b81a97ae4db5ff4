"""The compose file, by the specification's schema and by what its services need of each other."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.files import DEPLOY, conforms, read

COMPOSE = DEPLOY / "compose.yaml"
SERVICES: dict[str, Any] = read("compose.yaml")["services"]
EXAMPLE = (DEPLOY / "env.example").read_text()
ONCE = {"bucket", "deployments"}
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|KEY")


def test_it_conforms_to_the_specification(tmp_path: Path) -> None:
    assert conforms(COMPOSE, "vendor.compose-spec")
    worse = tmp_path / "compose.yaml"
    worse.write_text(COMPOSE.read_text().replace("condition: service_healthy", "condition: service_hale"))
    assert not conforms(worse, "vendor.compose-spec")


def test_docker_takes_it(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker with its compose plugin is not installed here")
    given = tmp_path / "env"
    given.write_text(re.sub(r"^(\w+)=$", r"\1=0123456789", EXAMPLE, flags=re.MULTILINE))
    command = [docker, "compose", "--file", COMPOSE, "--env-file", given, "--profile", "gpu", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_watched_restarted_and_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == ("on-failure:3" if name in ONCE else "unless-stopped")
    assert (name in ONCE) != ("healthcheck" in service)
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "the API runs code for whoever reaches it"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_for_what_can_be_waited_for(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if other in ONCE else "service_healthy"
        assert how == {"condition": expected}
        assert "profiles" not in SERVICES[other]


def test_volumes_are_named() -> None:
    mounted = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert mounted == set(read("compose.yaml")["volumes"])


def test_secrets_come_from_the_environment_alone() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if SECRET.search(name):
                assert re.fullmatch(r"\$\{\w+:[?-][^}]*\}", value), name
    asked = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert asked == set(re.findall(r"^(?:# )?(\w+)=", EXAMPLE, re.MULTILINE))
    assert not re.search(r"^(?:# )?\w*(PASSWORD|TOKEN|SECRET)\w*=.", EXAMPLE, re.MULTILINE)
    required = {name for name in asked if f"${{{name}:?" in COMPOSE.read_text()}
    assert required == set(re.findall(r"^(\w+)=", EXAMPLE, re.MULTILINE))


def test_the_database_is_postgresql_by_its_asynchronous_driver() -> None:
    url = SERVICES["server"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"]
    assert url == "postgresql+asyncpg://${POSTGRES_USER}:${POSTGRES_PASSWORD}@database:5432/prefect"


def test_a_gpu_worker_has_a_gpu_and_takes_one_run_at_a_time() -> None:
    worker = SERVICES["worker-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    assert worker["profiles"] == ["gpu"]
    assert worker["build"]["args"] == {"VARIANT": "cuda"}
    assert worker["image"].endswith("-cuda")
    for service in (worker, SERVICES["worker"]):
        assert service["command"][-3:-1] == ["--limit", "1"]


def test_the_shell_of_the_deployments_service_is_sound() -> None:
    (shell, option, script) = SERVICES["deployments"]["command"]
    subprocess.run([shell, "-n"], input=script.replace("$$", "$"), text=True, check=True)
    assert option == "-ec"
    assert yaml.safe_load(COMPOSE.read_text())["x-runs"]["LSP_STORE"] == "s3://lsp/store"
