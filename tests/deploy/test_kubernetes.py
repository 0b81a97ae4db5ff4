"""The manifests, by the schemas of Kubernetes; the base job templates, rendered as a worker renders them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect.utilities.templating import apply_values, find_placeholders
from pydantic_settings import CliApp

from flows.commands import Join
from flows.config import CompressConfig
from tests.deploy.files import DEPLOY, documents

VERSION = "1.33"  # the first in which a job's successPolicy is stable
FILES = ("kubernetes/worker.yaml", "kubernetes/torchrun.yaml")
MANIFESTS = {f"{one['kind']} {one['metadata']['name']}": one for name in FILES for one in documents(name)}
TEMPLATES = ("kubernetes", "docker")
PREFECTS_OWN = ("completions", "parallelism")  # which its worker asks for, in a place where Kubernetes ignores them


def template(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEPLOY / kind / "base-job-template.json").read_text())
    return content


def rendered(kind: str, **given: Any) -> dict[str, Any]:
    """Returns the job configuration with every variable's default, those ``given`` in their place."""
    properties = template(kind)["variables"]["properties"]
    values = {name: one["default"] for name, one in properties.items() if "default" in one} | given
    configuration: Any = apply_values(template(kind)["job_configuration"], values)
    return configuration


def job() -> dict[str, Any]:
    manifest: dict[str, Any] = rendered("kubernetes", name="run", env=[], labels={}, command=["true"])["job_manifest"]
    for name in PREFECTS_OWN:
        assert manifest["spec"]["template"]["spec"].pop(name) == 1
    return manifest


def pods() -> Iterator[dict[str, Any]]:
    yield job()["spec"]["template"]["spec"]
    for manifest in MANIFESTS.values():
        if "template" in manifest.get("spec", {}):
            yield manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_valid(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], VERSION, strict=True)


def test_a_manifest_with_a_wrong_name_is_not() -> None:
    worse = json.loads(json.dumps(MANIFESTS["Job lsp-train"]).replace("completionMode", "completionMood"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worse, VERSION, strict=True)


def test_the_job_of_a_run_is_valid() -> None:
    kubernetes_validate.validate(job(), VERSION, strict=True)
    assert job()["spec"]["backoffLimit"] == 0, "Prefect puts an evicted run back into its queue, but for a retried job"


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_names_its_variables_and_explains_them(kind: str) -> None:
    content = template(kind)
    properties = content["variables"]["properties"]
    Draft202012Validator.check_schema(content["variables"])
    Draft202012Validator(content["variables"]).validate(
        {name: one["default"] for name, one in properties.items() if "default" in one}
    )
    assert {found.name for found in find_placeholders(content["job_configuration"])} == properties.keys()
    assert all(one["title"] and one["description"].endswith(".") for one in properties.values())


def test_a_docker_run_gets_the_gpu_that_its_pool_names() -> None:
    assert rendered("docker")["container_create_kwargs"] == {"device_requests": []}
    gpu = [{"driver": "nvidia", "device_ids": ["1"], "capabilities": [["gpu"]]}]
    assert rendered("docker", device_requests=gpu)["container_create_kwargs"] == {"device_requests": gpu}


def test_pods_are_confined_and_say_what_they_need() -> None:
    for pod in pods():
        context = pod["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] == context["fsGroup"] == 10001  # the Dockerfile's user
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "automountServiceAccountToken" in pod
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            written = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {"/var/lib/lsp", "/tmp"} <= written, "nothing else can be written to"


def test_what_a_pod_mounts_is_there() -> None:
    names = {name.partition(" ")[2] for name in MANIFESTS if name.startswith(("PersistentVolumeClaim", "ConfigMap"))}
    accounts = {name.partition(" ")[2] for name in MANIFESTS if name.startswith("ServiceAccount")}
    for pod in pods():
        assert pod["serviceAccountName"] in accounts
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            source = volume.get("persistentVolumeClaim", {}).get("claimName") or volume.get("configMap", {}).get("name")
            assert source is None or source in names
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()


def test_the_worker_is_probed_where_it_answers_and_may_make_jobs() -> None:
    deployment = MANIFESTS["Deployment lsp-worker"]["spec"]["template"]["spec"]
    (container,) = deployment["containers"]
    assert "--with-healthcheck" in container["args"]
    assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/health"
    rights = {tuple(rule["resources"]): rule["verbs"] for rule in MANIFESTS["Role lsp-worker"]["rules"]}
    assert {"create", "delete", "watch"} <= set(rights[("jobs",)])
    assert "create" not in rights[("pods", "pods/log", "pods/status")]


def test_the_numbers_of_a_training_on_several_pods_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    several, service = MANIFESTS["Job lsp-train"]["spec"], MANIFESTS["Service lsp-train"]
    config = CompressConfig.model_validate(yaml.safe_load(MANIFESTS["ConfigMap lsp-train"]["data"]["compress.yaml"]))
    pod = several["template"]["spec"]
    (container,) = pod["containers"]
    script = container["args"][-1]
    endpoint = config.training.rendezvous_endpoint or ""
    assert several["completions"] == several["parallelism"] == config.training.num_nodes
    assert several["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(config.training.num_processes)
    (arguments,) = re.findall(r"flows join (.*)", script)
    joins: list[Join] = []
    monkeypatch.setattr(Join, "cli_cmd", joins.append)
    CliApp.run(Join, cli_args=arguments.split())
    assert [(join.endpoint, join.num_processes) for join in joins] == [(endpoint, config.training.num_processes)]
    host, _, port = endpoint.partition(":")
    assert host == f"lsp-train-0.{service['metadata']['name']}"  # pod 0 by its index and the headless service
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "they meet before anything is ready"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert [int(port)] == [one["port"] for one in service["spec"]["ports"]]
    assert config.store.startswith("/var/lib/lsp/"), "the nodes of a training share its folder"
