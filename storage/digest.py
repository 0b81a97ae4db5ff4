"""Content digests: canonical JSON, files, folders, and the key of a stage."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def canonical_json(value: Any) -> str:
    """Returns the one JSON text of ``value``: keys sorted, no spaces, ASCII.

    As in JSON, a list and a tuple are equal, and so are 0.0 and -0.0; ``1``, ``1.0`` and ``true`` are three values, and
    text is compared by code points: nothing is normalized. ``json.loads`` gives back what was given. Errors:
    ``TypeError`` or ``ValueError`` naming the place of what is not plain, finite JSON.
    """
    plain = _plain(value, "value")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


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
    return digest_listing(files), files


def digest_listing(files: Mapping[str, tuple[str, int]]) -> str:
    """Returns the digest of a folder, by the (sha256, size in bytes) of its files."""
    return digest_bytes(canonical_json({name: list(facts) for name, facts in files.items()}).encode())


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


def _plain(value: Any, place: str) -> Any:
    """Returns ``value`` as dictionaries and lists, with one zero."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{place} has the key {name!r}: keys must be strings")
            _check_text(name, f"a key of {place}")
        return {name: _plain(item, f"{place}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{place} is {value}: only finite numbers can be keyed")
        return value + 0.0  # the sum of the two zeros is the positive one
    if isinstance(value, str):
        _check_text(value, place)
    elif value is not None and not isinstance(value, int):
        raise TypeError(f"{place} is a {type(value).__name__}: only plain JSON can be keyed")
    return value


def _check_text(text: str, place: str) -> None:
    pair = SURROGATE_PAIR.search(text)
    if pair is not None:  # JSON would write it as it writes the one character that it stands for
        raise ValueError(f"{place} holds the surrogate pair {pair[0]!r}: decode it to one character")
