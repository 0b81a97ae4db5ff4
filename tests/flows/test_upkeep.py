"""``python -m flows store``: what a person sees of a store, and what goes when asked to."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.compress import compress
from flows.config import CompressConfig
from storage.store import Store

pytestmark = pytest.mark.usefixtures("prefect_server")
Make = Callable[..., CompressConfig]
Says = Callable[..., str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finished")
    compress(tiny_config(folder, targets=[{"ratio": 0.4}], output=folder / "first"))
    return folder, compress(tiny_config(folder))


@pytest.fixture
def place(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """Returns a copy of the store in which nothing is young."""
    store = tmp_path / "store"
    shutil.copytree(finished[0] / "store", store)
    for path in store.rglob("*"):
        os.utime(path, (time.time() - 7200,) * 2)
    return store


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str], place: Path) -> Says:
    """Returns a function that runs a ``store`` command on the copy, checks its exit status and returns what it said."""

    def run(*arguments: str, status: int = 0) -> str:
        try:
            ended = main(["store", *arguments, "--store", str(place)])
        except SystemExit as exit_:
            ended = int(exit_.code or 0)
        said = capsys.readouterr()
        assert ended == status, said
        return said.out if status in (0, 1) else said.err

    return run


def key_of(report: dict[str, Any], name: str) -> str:
    return next(stage["key"] for stage in report["stages"] if stage["name"] == name)


def test_list_shows_every_artifact_and_its_run(says: Says, place: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    keys = {key for _, key in Store(str(place)).places()}
    lines = says("list").splitlines()
    assert len(lines) == len(keys) + 2
    assert {line.split()[1] for line in lines[1:-1]} == {key[:12] for key in keys}
    assert lines[-1].startswith(f"{len(keys)} artifacts, ")
    listed = json.loads(says("list", "--kind", "merge", "--json"))
    assert {entry["kind"] for entry in listed} == {"merge"}
    assert finished[1]["run"] in {entry["lineage"]["run"]["id"] for entry in listed}


def test_show_goes_back_to_the_model_and_the_text(
    says: Says, finished: tuple[Path, dict[str, Any]], tiny_model: Path, tiny_text: dict[str, Path]
) -> None:
    key = key_of(finished[1], "merge")
    out = says("show", key[:10])
    assert f"merge {key}" in out
    assert str(tiny_model) in out
    assert str(tiny_text["train"]) in out
    assert "projectors: train " in out
    assert "tokens: calibrate " in out
    assert "dense_outputs: train " in out  # a hint that was read
    origins = json.loads(says("show", key, "--json"))["origins"]
    assert {"model", "tokens", "text", "tokenizer", "grams", "grid"} <= {origin["name"] for origin in origins}
    assert all(origin["in_store"] or origin["facts"] or origin["name"] == "tokenizer" for origin in origins)


def test_verify_tells_damage_by_its_exit_status(
    says: Says, place: Path, finished: tuple[Path, dict[str, Any]], tiny_config: Make, tmp_path: Path
) -> None:
    assert "0 damaged" in says("verify")
    key = key_of(finished[1], "gather")
    manifest = Store(str(place)).manifest("gather", key)
    file = place / "payload" / manifest.digest / "units.json"
    file.write_bytes(file.read_bytes()[:-2] + b" \n")
    out = says("verify", status=1)
    assert f"gather {key[:12]}: units.json has another content; withdrawn" in out
    assert json.loads(says("verify", "--json"))["damaged"] == []
    report = compress(tiny_config(tmp_path))
    assert [stage["name"] for stage in report["stages"] if stage["state"] == "Completed"] == ["gather"]


def test_gc_keeps_what_the_newest_run_or_a_report_needs(
    says: Says, place: Path, finished: tuple[Path, dict[str, Any]], tiny_config: Make, tmp_path: Path
) -> None:
    folder, report = finished
    before = set(Store(str(place)).places())
    needed = {(stage["name"], stage["key"]) for stage in report["stages"]}
    out = says("gc", "--last", "1")
    assert "would be freed; --delete frees them" in out
    assert set(Store(str(place)).places()) == before
    by_report = json.loads(says("gc", "--report", str(folder / "output" / "report.json"), "--json"))
    by_run = json.loads(says("gc", "--last", "1", "--json"))
    assert by_report == by_run
    assert {(entry["kind"], entry["key"]) for entry in by_run["artifacts"]} == before - needed
    assert json.loads(says("gc", "--last", "2", "--json"))["artifacts"] == []
    assert " freed" in says("gc", "--last", "1", "--delete")
    assert set(Store(str(place)).places()) == needed
    assert {stage["state"] for stage in compress(tiny_config(tmp_path))["stages"]} == {"Cached"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gc",), "say what to keep: --last N"),
        (("gc", "--report", "/no/such/report.json"), "cannot be read: No such file"),
        (("gc", "--report", __file__), "is no report"),
        (("show", "zz"), "no artifact in .* has a key that starts with 'zz'"),
    ],
)
def test_mistakes_are_one_line(says: Says, arguments: tuple[str, ...], said: str) -> None:
    err = says(*arguments, status=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(said, err)


def test_a_place_without_a_store_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["store", "list", "--store", str(tmp_path / "none")]) == 2
    assert "there is no artifact in" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
