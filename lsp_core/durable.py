"""Files that a kill cannot tear and damage cannot falsify: named tensors and a few fields, in safetensors.

A file is written under a temporary name, synced and renamed. Its metadata has one entry, ``state``: the fields as JSON,
and with them a sha256 over the fields and the tensors, which reading verifies. One entry, because the order of several
differs from one process to the next, and equal contents are to give equal bytes.
"""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

ENTRY = "state"
DIGEST = "sha256"
NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
log = logging.getLogger(__name__)


class DamagedFileError(ValueError):
    """A file that is not what was written; the message says in which way."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a file holds: ``tensors`` on the CPU, read from the disk where they are used, and ``fields``."""

    tensors: dict[str, Tensor]
    fields: dict[str, Any]


def digest_tensors(tensors: Mapping[str, Tensor], fields: Mapping[str, Any] | None = None) -> str:
    """Returns the sha256, in hexadecimal, of names, dtypes, shapes and bytes of tensors, and of JSON ``fields``."""
    digest = hashlib.sha256(json.dumps(fields or {}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_durably(
    path: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any], *, previous: Path | None = None
) -> None:
    """Writes ``path`` whole or not at all; at every instant the old file or the new one is there.

    ``fields``: plain JSON. ``previous``: the name that the old file, if there is one, goes on under.
    """
    assert DIGEST not in fields
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    state = {**fields, DIGEST: digest_tensors(held, fields)}
    try:
        save_file(held, temporary, metadata={ENTRY: json.dumps(state)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if previous is not None and path.exists():
        name_again(path, previous)
    temporary.replace(path)
    sync_folder(path.parent)


def read_checked(path: Path) -> Saved:
    """Returns what ``write_durably`` wrote to ``path``.

    Errors: ``FileNotFoundError``; ``DamagedFileError`` if a single bit is not as it was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            fields = json.loads((file.metadata() or {})[ENTRY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        written = fields.pop(DIGEST)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{path} is no whole file of tensors: {type(error).__name__}: {error}") from error
    if written != digest_tensors(tensors, fields):
        raise DamagedFileError(f"{path}: its content does not match its digest")
    return Saved(tensors=tensors, fields=fields)


def name_again(source: Path, target: Path) -> None:
    """Gives the file ``source`` a second name, whatever ``target`` was, and keeps one copy of its bytes.

    A file system without hard links moves it instead.
    """
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        log.info("no hard links in %s: %s is moved", target.parent, source.name)
        source.replace(target)


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
