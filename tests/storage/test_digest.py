"""Digests depend on content alone, and what cannot be keyed says where it is."""

import copy
import hashlib
import json
import math
import struct
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from storage.digest import canonical_json, digest_bytes, digest_file, digest_folder, stage_key


def test_canonical_json_is_one_text_for_equal_values() -> None:
    assert canonical_json({"b": [1, 2.5, True, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5,true,null]}'
    assert canonical_json({"x": {"b": 1, "a": (1, 2)}}) == canonical_json({"x": {"a": [1, 2], "b": 1}})


def is_text(value: str) -> bool:
    """Whether no two neighbours are a surrogate pair, the one thing in a string that JSON cannot write."""
    return not any("\ud800" <= a <= "\udbff" and "\udc00" <= b <= "\udfff" for a, b in pairwise(value))


FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(), max_size=12).filter(is_text)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | FINITE | TEXT
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
WRAPPERS: dict[str, Any] = {
    "[0]": lambda value: [value],
    "[1]": lambda value: (None, value),
    ".a": lambda value: {"a": value, "b": 0},
}
PATHS = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5)


def bury(value: Any, path: list[str]) -> Any:
    """Returns ``value`` at the place ``path``, of lists, tuples and dictionaries."""
    for step in reversed(path):
        value = WRAPPERS[step](value)
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two values are one: of the same types at every place, floats to the bit but for the sign of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or a == b == 0
    return bool(a == b)


def reordered(value: Any, random: Any) -> Any:
    """Returns ``value`` with the keys of every dictionary in another order and every list a tuple, or not."""
    if isinstance(value, dict):
        names = list(value)
        random.shuffle(names)
        return {name: reordered(value[name], random) for name in names}
    if isinstance(value, list):
        return random.choice([list, tuple])(reordered(item, random) for item in value)
    return value


@FEW
@given(PLAIN)
def test_a_text_says_the_whole_value_in_ascii(value: Any) -> None:
    before = copy.deepcopy(value)
    text = canonical_json(value)
    assert text.isascii()
    assert same(json.loads(text), value)
    assert canonical_json(json.loads(text)) == text
    assert same(value, before)


@FEW
@given(PLAIN, PLAIN)
def test_distinct_values_have_distinct_texts(first: Any, second: Any) -> None:
    assert (canonical_json(first) == canonical_json(second)) == same(first, second)


@FEW
@given(PLAIN, st.randoms(use_true_random=False))
def test_neither_the_order_of_keys_nor_tuples_matter(value: Any, random: Any) -> None:
    assert canonical_json(reordered(value, random)) == canonical_json(value)


@FEW
@given(FINITE, PATHS)
@example(5e-324, [])
@example(0.1, [])
@example(-0.0, ["[1]", ".a"])
def test_floats_keep_every_bit_but_for_the_sign_of_zero(value: float, path: list[str]) -> None:
    assert canonical_json(bury(value, path)) == canonical_json(bury(0.0 if value == 0 else value, path))
    expected = struct.pack("<d", abs(value) if value == 0 else value)
    assert struct.pack("<d", json.loads(canonical_json(value))) == expected


@FEW
@given(PATHS, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_is_refused_at_any_depth(path: list[str], number: float) -> None:
    with pytest.raises(ValueError) as error:
        canonical_json(bury(number, path))
    assert str(error.value).startswith(f"value{''.join(path)} is {number}:")


@FEW
@given(PATHS, st.sampled_from([Path("x"), Path("/"), b"x", 1j, {1}, object]))
def test_paths_and_other_objects_are_refused_at_any_depth(path: list[str], thing: Any) -> None:
    with pytest.raises(TypeError) as error:
        canonical_json(bury(thing, path))
    assert str(error.value).startswith(f"value{''.join(path)} is a {type(thing).__name__}:")


@FEW
@given(TEXT)
@example("\ud800")
@example("\udc80.safetensors")
@example("\udfff\ud800")
@example("\U0001f600")
@example('\x00\x7f\u2028\\"/')
def test_any_text_comes_back(text: str) -> None:
    assert json.loads(canonical_json({text: [text]})) == {text: [text]}
    assert canonical_json(text).isascii()


@FEW
@given(TEXT, st.sampled_from("éöÅ각"), TEXT)
def test_composed_and_decomposed_text_are_kept_apart(before: str, letter: str, after: str) -> None:
    composed, decomposed = (unicodedata.normalize(form, before + letter + after) for form in ("NFC", "NFD"))
    assert canonical_json(composed) != canonical_json(decomposed)


def test_a_surrogate_pair_is_refused_since_json_takes_it_for_one_character() -> None:
    pair = "a\ud83d\ude00"
    assert json.dumps(pair) == json.dumps("a\U0001f600")
    with pytest.raises(ValueError, match=r"^value\.a\[1\] holds the surrogate pair"):
        canonical_json({"a": [0, pair]})
    with pytest.raises(ValueError, match=r"^a key of value\.a holds the surrogate pair"):
        canonical_json({"a": {pair: 0}})


def test_true_and_one_and_one_point_zero_are_three_values() -> None:
    assert [canonical_json(value) for value in (True, 1, 1.0)] == ["true", "1", "1.0"]
    assert len({canonical_json(value) for value in (False, 0, 0.0, -0.0, None, "", "0", [], {})}) == 8


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
