"""The files of ``deploy/``, and the tools that check them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a program of this environment."""
    program = Path(sys.executable).with_name(name)
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def conforms(path: Path, schema: str) -> bool:
    """Returns whether a file conforms to a schema that check-jsonschema carries."""
    return tool("check-jsonschema", "--builtin-schema", schema, path).returncode == 0
