"""``python -m flows export``: a compressed checkpoint in another form."""

import shutil
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from lsp_core.export import export_dense
from storage.files import renamed
from tasks.model_files import LICENCE_PATTERNS, TERMS_PATTERNS, TOKENIZER_PATTERNS, matching
from tasks.processors import PROCESSOR_FILES


def export(folder: Path, *, dense: bool, output: Path | None = None, dtype: str | None = None) -> dict[str, Any]:
    """Writes the compressed checkpoint in ``folder`` as an ordinary dense one to ``output``; returns what was written.

    ``output``: None: beside ``folder``, with ``-dense`` at the end of its name. The tokenizer or image processor and
    the licence are copied. It appears whole or not at all.
    Errors: ``ValueError`` if no form is named, if ``folder`` holds no compressed model, if something is at ``output``
    already, or if the outputs of what was written are not those of the compressed model.
    """
    if not dense:
        raise ValueError(
            "say what to export: --dense, the only form there is, writes the same function as a checkpoint of the "
            "base architecture; the folder itself is the compressed form"
        )
    folder = folder.expanduser()
    output = folder.resolve().with_name(f"{folder.resolve().name}-dense") if output is None else output.expanduser()
    _check(folder, output)
    disable_progress_bar()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.{uuid.uuid4().hex}.tmp")
    try:
        written = export_dense(folder, temporary, dtype=None if dtype is None else getattr(torch, dtype))
        _copy(folder, temporary)
        if not renamed(temporary, output):
            raise _taken(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"checkpoint": str(folder), "output": str(output), **asdict(written)}


def _check(folder: Path, output: Path) -> None:
    """Errors: ``ValueError`` if ``output`` is ``folder`` or no new place, or if there is no ``folder``."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if output.resolve() == folder.resolve():
        raise ValueError(
            f"--output={str(output)!r} is the checkpoint itself, which stays as it is: name another folder"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise _taken(output)


def _taken(output: Path) -> ValueError:
    return ValueError(f"--output={str(output)!r} exists and is not empty: name another folder, or delete it")


def _copy(folder: Path, output: Path) -> None:
    """Copies what a model reads with, and its licence."""
    licence = (*LICENCE_PATTERNS, *TERMS_PATTERNS)
    for path in matching(folder, (*TOKENIZER_PATTERNS, *PROCESSOR_FILES, *licence)):
        target = output / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
