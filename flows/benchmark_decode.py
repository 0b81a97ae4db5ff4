"""``python -m flows benchmark decode``: the options of the command line, measured by ``lsp_core`` and printed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lsp_core.decode_benchmark import decode as measure
from lsp_core.decode_report import table
from lsp_core.decode_settings import ARMS, DecodeSettings

FIELDS = {"context": "contexts", "batch": "batches", "ratio": "ratios", "dtype": "dtypes"}


def decode(options: Mapping[str, Any], output: Path | None, *, as_json: bool) -> None:
    """Measures what ``options``, named as on the command line, ask for, and prints tables or one JSON object.

    Errors: as ``DecodeSettings`` and ``lsp_core.decode_benchmark.decode``.
    """
    result = measure(settings_of(options), output)
    print(json.dumps(result) if as_json else "\n".join(table(result)))


def settings_of(options: Mapping[str, Any]) -> DecodeSettings:
    """Returns the settings; no ``arms`` are all of them. Errors: as ``DecodeSettings``."""
    values = {FIELDS.get(name, name): value for name, value in options.items()}
    return DecodeSettings(**values | {"arms": values["arms"] or ARMS})
