"""Content digests: canonical JSON, files, folders, and the key of a stage."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> str:
    """Returns the one JSON text of ``value``: keys sorted, no spaces, ASCII.

    Errors: ``TypeError`` or ``ValueError`` naming the place of what is not plain, finite JSON.
    """
    _check_plain(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_bytes(data: bytes) -> str:
    """Returns the sha256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Returns the sha256 of a file's content, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_folder(folder: Path) -> tuple[str, dict[str, tuple[str, int]]]:
    """Returns the digest of all files below ``folder``, and each one's (sha256, size in bytes) by its relative name.

    Links are followed. Errors: ``OSError`` for a folder that is not there, or anything below it that cannot be read.
    """
    paths = sorted(_files_below(folder))
    files = {path.relative_to(folder).as_posix(): (digest_file(path), path.stat().st_size) for path in paths}
    return digest_bytes(canonical_json({name: list(facts) for name, facts in files.items()}).encode()), files


def stage_key(stage: str, version: int, inputs: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """Returns the key of a stage's output: a digest of its name, its version, its inputs' digests and its settings.

    Errors: as ``canonical_json``.
    """
    parts = {"stage": stage, "version": version, "inputs": dict(inputs), "settings": dict(settings)}
    return digest_bytes(canonical_json(parts).encode())


def _files_below(folder: Path) -> list[Path]:
    def stop(error: OSError) -> None:
        raise error

    walk = os.walk(folder, followlinks=True, onerror=stop)
    return [Path(parent, name) for parent, _, names in walk for name in names]


def _check_plain(value: Any, place: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{place} has the key {name!r}: keys must be strings")
            _check_plain(item, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{place}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is {value}: only finite numbers can be keyed")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise TypeError(f"{place} is a {type(value).__name__}: only plain JSON can be keyed")
