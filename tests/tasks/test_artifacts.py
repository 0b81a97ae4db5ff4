import json
from pathlib import Path

import pytest

from lsp_core.discovery import discover_units
from tasks.artifacts import read_json, read_units, write_json, write_units
from tasks.models import ModelSource, load_skeleton


def test_units_come_back_as_they_were(source: ModelSource, tmp_path: Path) -> None:
    units = discover_units(load_skeleton(source))
    write_units(tmp_path, units)
    read = read_units(tmp_path)
    assert read == units
    assert len(set(read)) == len(units)  # hashable, as the keys of a mapping must be


def test_json_holds_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2.5, None, "ä"]})
    assert read_json(tmp_path / "a.json") == {"b": [1, 2.5, None, "ä"]}
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 2.5, None, "ä"]}
    with pytest.raises(ValueError):
        write_json(tmp_path / "b.json", {"b": float("nan")})
    assert not (tmp_path / "b.json").exists()
