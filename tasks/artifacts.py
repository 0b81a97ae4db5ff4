"""Small things that several stages write and read: JSON files, the list of units, the tensors of a stage."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lsp_core.units import Unit
from storage.grid import load_tokens
from storage.manifest import ArtifactRef
from storage.tensors import load_tensors
from tasks.caching import Work

UNITS = "units.json"


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` for people and programs to read; NaN is an error."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_units(folder: Path, units: list[Unit]) -> None:
    write_json(folder / UNITS, [asdict(unit) for unit in units])


def read_units(folder: Path) -> list[Unit]:
    return [unit_of(record) for record in read_json(folder / UNITS)]


def unit_of(record: dict[str, Any]) -> Unit:
    """Returns the unit that ``asdict`` and JSON made ``record`` of."""
    return Unit(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})


def read_bases(work: Work, bases: ArtifactRef) -> tuple[list[Unit], dict[str, Tensor]]:
    """Returns the units and their ordered bases, (D, D) each."""
    folder = work.folder(bases)
    return read_units(folder), load_tensors(folder)


def read_tokens(work: Work, tokens: ArtifactRef) -> Tensor:
    """Returns token blocks as (B, T) int64."""
    return torch.from_numpy(load_tokens(work.folder(tokens))).to(torch.int64)
