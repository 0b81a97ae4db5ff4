"""The configuration file: YAML that holds one mapping of settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Errors: ``ValueError`` if there is no such file, or no mapping in it.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no mapping of settings: start it with `model:`")
    return values


def merged(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``values`` with those of ``given`` in their place, section by section."""
    result = dict(values)
    for name, value in given.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
