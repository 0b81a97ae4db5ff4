"""The Dockerfile: what hadolint says, and what it does not look at."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import DEPLOY, ROOT, tool

TEXT = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.split(maxsplit=1) for line in re.sub(r"\\\n", " ", TEXT).splitlines() if line and not line.startswith("#")
]


def of(instruction: str) -> list[str]:
    return [given for name, given in INSTRUCTIONS if name == instruction]


def test_hadolint_has_no_word_to_say(tmp_path: Path) -> None:
    said = tool("hadolint", DEPLOY / "Dockerfile")
    assert (said.returncode, said.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text(TEXT.replace("tini=0.19.*", "tini"))
    assert tool("hadolint", worse).returncode == 1


def test_the_base_is_pinned_and_the_user_is_not_root() -> None:
    (image,) = re.findall(r"PYTHON_IMAGE=(\S+)", TEXT.replace("# ", ""))[:1] or [""]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", of("ARG")[0].partition("=")[2]), (
        image
    )
    assert of("USER") == ["10001:10001"]
    assert TEXT.index("\nUSER ") < TEXT.index("\nENTRYPOINT ")


def test_versions_come_from_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    for name in ("torch", "hatchling", "editables"):
        assert re.search(rf"^{name}==\S+$", constraints, re.MULTILINE), name
    installs = re.findall(r"pip install (.*?)(?:;|&&|$)", " ".join(of("RUN")))
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in install or "torch.txt" in install for install in installs)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"\.\[([a-z0-9,]+)\]", TEXT)
    assert set(wanted.split(",")) == extras.keys() - {"dev"}


def test_only_a_cpu_build_of_torch_comes_from_another_index() -> None:
    assert re.findall(r"https?://[^\s\"]+", TEXT) == ["https://download.pytorch.org/whl/cpu"]
    assert re.search(
        r'"\$\{VARIANT\}" = cpu \]; then\s+python -m pip install --no-deps --index-url', " ".join(of("RUN"))
    )


def test_dependencies_are_installed_before_the_sources_are_there() -> None:
    assert [given.split()[0] for given in of("COPY")] == ["pyproject.toml", "."]
    assert TEXT.index("--editable") < TEXT.index("COPY . .")


def test_only_what_is_needed_goes_into_the_image() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert next(line for line in lines if line and not line.startswith("#")) == "*"
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"kernels", "pyproject.toml", "constraints.txt", "deploy/prefect.yaml"} <= set(kept) | {"tests"}
    assert not {".git", ".venv", "runs", ".lsp", "deploy", "tests"} & set(kept)


@pytest.mark.parametrize("command", ["prefect worker start", "python -m flows"])
def test_any_command_runs_as_it_is(command: str) -> None:
    assert of("ENTRYPOINT") == ['["tini", "--"]'], f"which hands {command} on, and signals to it"
    assert yaml.safe_load(of("CMD")[0])[0] == "python"
