"""The store's benchmark compares what computes the same, and leaves nothing behind; how fast it is, is not tested."""

import json
import tempfile
from pathlib import Path

import pytest

from flows.benchmark_store import store
from flows.printing import print_facts


def test_every_arm_finds_the_same_and_nothing_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = store(file_bytes=(1 << 20) + 1, rows=40, points=3, left=10)
    assert list(tmp_path.iterdir()) == []

    arms = {arm["name"]: arm for arm in result["digests"]}
    assert set(arms) == {"sha256sum", "digest_file", "digest_folder"}
    for arm in arms.values():
        assert arm["GB/s"] == pytest.approx(((1 << 20) + 1) / 1e9 / arm["seconds"])
        assert arm["ratio"] == pytest.approx(arms["sha256sum"]["seconds"] / arm["seconds"])
    assert result["digest_ratio"] == pytest.approx(min(arm["ratio"] for arm in list(arms.values())[1:]))
    assert [arm["name"] for arm in result["memory"]] == ["first", "remembered"]
    assert all(arm["ms"] > 0 for arm in result["memory"])

    assert result["grid_rows"] == 40
    assert result["grid_rows_left"] == "0, 4, 8, 13, 17, 21, 26, 30, 34, 39"
    by_name, by_value = result["grid"]
    assert result["grid_seconds"] == by_name["seconds"]
    assert result["grid_ratio"] == pytest.approx(by_value["seconds"] / by_name["seconds"])

    assert json.loads(json.dumps(result)) == result
    print_facts(result, as_json=False)
    assert "digest_ratio" in capsys.readouterr().out


def test_what_is_left_is_found_when_it_is_no_row_or_every_one() -> None:
    assert store(file_bytes=1, rows=5, points=1, left=0)["grid_rows_left"] == ""
    assert store(file_bytes=1, rows=5, points=1, left=5)["grid_rows_left"] == "0, 1, 2, 3, 4"
