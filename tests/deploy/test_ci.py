"""The CI job: by GitHub's schema, and its two steps run by the shell that it names."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.config import CompressConfig
from tests.deploy.files import DEPLOY, ROOT, conforms
from tests.flows.test_check import RESULTS, in_store

PATH = DEPLOY / "ci" / "compress.yml"
WORKFLOW = yaml.safe_load(PATH.read_text())
JOB = WORKFLOW["jobs"]["compress"]
COMPRESS, CHECK = JOB["steps"]


def shell(step: dict[str, str], folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """Runs a step in the checkout, with this Python, and a ``prefect`` that writes down its arguments."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, line in (
        ("python", f'exec {shlex.quote(sys.executable)} "$@"'),
        ("prefect", f'for word; do printf "%s\\0" "$word"; done > {shlex.quote(str(folder / "said"))}'),
    ):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    script = folder / "step.sh"
    script.write_text(step["run"])
    command = [str(script) if word == "{0}" else word for word in JOB["defaults"]["run"]["shell"].split()]
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | given
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_it_conforms_to_the_schema(schema: str) -> None:
    assert conforms(PATH, schema)


def test_it_asks_for_no_rights_and_holds_no_secrets() -> None:
    assert WORKFLOW["permissions"] == {}
    for name, value in JOB["env"].items():
        if any(word in name for word in ("SECRET", "KEY", "AUTH")):
            assert value == f"${{{{ secrets.{name} }}}}"
    for step in JOB["steps"]:
        assert "${{" not in step["run"], "what a user types must not become part of a script"


def test_it_runs_the_deployment_watches_it_and_names_the_run(tmp_path: Path) -> None:
    done = shell(COMPRESS, tmp_path, RUN="compress-7-1", RATIO="0.3", LSP_STORE="s3://bucket/lsp")
    assert (done.returncode, done.stderr) == (0, "")
    said = (tmp_path / "said").read_text().split("\0")[:-1]
    assert said[:4] == ["deployment", "run", "compress/compress", "--watch"]
    assert said[said.index("--flow-run-name") + 1] == "compress-7-1"
    assert int(said[said.index("--watch-timeout") + 1]) < 60 * JOB["timeout-minutes"]
    parameters = json.loads(said[said.index("--params") + 1])
    config = CompressConfig.model_validate(parameters["config"])
    assert (config.store, config.targets[0].ratio) == ("s3://bucket/lsp", 0.3)


@pytest.mark.parametrize(("bound", "status"), [("15.3", 0), ("15.1", 1)])
def test_it_fails_where_the_perplexity_is_above_the_bound(tmp_path: Path, bound: str, status: int) -> None:
    in_store(tmp_path, "compress-7-1", RESULTS[:1])
    done = shell(CHECK, tmp_path, RUN="compress-7-1", LSP_STORE=str(tmp_path / "store"), MAX_PERPLEXITY=bound)
    assert done.returncode == status, done.stderr
    assert f"perplexity is 15.2, to be at most {bound}" in done.stdout + done.stderr
