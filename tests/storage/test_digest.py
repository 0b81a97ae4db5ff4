"""Digests depend on content alone, and what cannot be keyed says where it is."""

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from storage.digest import canonical_json, digest_bytes, digest_file, digest_folder, stage_key


def test_canonical_json_is_one_text_for_equal_values() -> None:
    assert canonical_json({"b": [1, 2.5, True, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5,true,null]}'
    assert canonical_json({"x": {"b": 1, "a": (1, 2)}}) == canonical_json({"x": {"a": [1, 2], "b": 1}})


@pytest.mark.parametrize("value", [0.1, 1e-300, 1 / 3, 2.0**60, 5e-324])
def test_floats_keep_every_bit(value: float) -> None:
    assert float(canonical_json(value)) == value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {2, 3}]}, r"value\.a\[1\]"),
        ({"a": {"b": Path("x")}}, r"value\.a\.b"),
        ({"a": b"bytes"}, r"value\.a"),
        ({1: "a"}, "value"),
    ],
)
def test_what_is_not_json_is_named(value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        canonical_json(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_named(number: float) -> None:
    with pytest.raises(ValueError, match=r"value\.rate\[1\]"):
        canonical_json({"rate": [1.0, number]})


def test_a_file_larger_than_one_read_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 12_289  # 3 MiB and a bit
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file") == digest_bytes(data) == hashlib.sha256(data).hexdigest()


def _fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_is_its_relative_names_and_contents(tmp_path: Path) -> None:
    files = {"b/c.bin": b"12", "a.json": b"{}", "b/.hidden": b""}
    first, facts = digest_folder(_fill(tmp_path / "first", files))
    second, _ = digest_folder(_fill(tmp_path / "elsewhere" / "second", dict(reversed(files.items()))))
    assert first == second
    assert facts == {name: (digest_bytes(data), len(data)) for name, data in files.items()}
    renamed, _ = digest_folder(_fill(tmp_path / "third", {"b/d.bin": b"12", "a.json": b"{}", "b/.hidden": b""}))
    changed, _ = digest_folder(_fill(tmp_path / "fourth", files | {"b/c.bin": b"13"}))
    assert len({first, renamed, changed}) == 3


def test_every_part_of_a_stage_makes_its_key() -> None:
    key = stage_key("gather", 1, {"tokens": "d"}, {"tie": True})
    assert key == stage_key("gather", 1, {"tokens": "d"}, {"tie": True})
    others = [
        stage_key("bases", 1, {"tokens": "d"}, {"tie": True}),
        stage_key("gather", 2, {"tokens": "d"}, {"tie": True}),
        stage_key("gather", 1, {"tokens": "e"}, {"tie": True}),
        stage_key("gather", 1, {"text": "d"}, {"tie": True}),
        stage_key("gather", 1, {"tokens": "d"}, {"tie": False}),
        stage_key("gather", 1, {}, {"tokens": "d", "tie": True}),
    ]
    assert len({key, *others}) == 1 + len(others)
    with pytest.raises(TypeError, match=r"settings.*device"):
        stage_key("gather", 1, {}, {"device": object()})


def test_what_a_linked_folder_holds_is_digested(tmp_path: Path) -> None:
    _fill(tmp_path / "elsewhere", {"f": b"1"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "elsewhere")
    first, facts = digest_folder(tmp_path / "folder")
    assert list(facts) == ["link/f"]
    _fill(tmp_path / "elsewhere", {"f": b"2"})
    assert digest_folder(tmp_path / "folder")[0] != first


@pytest.mark.parametrize("target", ["absent", "."])
def test_a_link_that_leads_nowhere_or_round_is_an_error(target: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="link"):
        digest_folder(tmp_path)


def test_a_folder_that_is_not_there_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        digest_folder(tmp_path / "absent")
