"""The version of each stage, on record in ``versions.json`` beside a digest of the source that it stands for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("versions.json")


def recorded_version(function: Callable[..., Any]) -> int:
    """Returns the version of the stage that ``function`` computes. Errors: ``KeyError`` if it is not on record."""
    records = json.loads(RECORD.read_text(encoding="utf-8"))
    version: int = records[f"{function.__module__.removeprefix('tasks.')}.{function.__name__}"]["version"]
    return version
