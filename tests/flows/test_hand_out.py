"""Handing a checkpoint out: whole or not at all, with nothing left behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import compress
from flows.compress import _replacing


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").write_text("new")
    os.utime(folder / "weights", (0, 0))  # copies have these times too
    os.utime(folder, (0, 0))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "output" / "0.3-kl").mkdir(parents=True)
    (tmp_path / "output" / "0.3-kl" / "weights").write_text("old")
    return tmp_path / "output" / "0.3-kl"


def names(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir()}


def test_what_fails_leaves_what_was_there(source: Path, target: Path) -> None:
    def write_card(copy: Path) -> None:
        (copy / "card").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), _replacing(source, target) as copy:
        write_card(copy)
    assert names(target) == {"0.3-kl"}
    assert (target / "weights").read_text() == "old"


def test_a_copy_that_fails_leaves_nothing(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copytree(_source: Path, copy: Path) -> None:
        copy.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(compress.shutil, "copytree", copytree)
    with pytest.raises(OSError, match="disk full"), _replacing(source, target):
        pass
    assert names(target) == {"0.3-kl"}


def test_a_copy_takes_the_place_of_what_was_there(source: Path, target: Path) -> None:
    with _replacing(source, target) as copy:
        (copy / "card").write_text("whole")
    assert names(target) == {"0.3-kl"}
    assert (target / "weights").read_text() == "new"
    assert (target / "card").read_text() == "whole"


def killed(source: Path, target: Path) -> Iterator[Path]:
    with _replacing(source, target) as copy:
        yield copy


def test_what_killed_runs_left_is_deleted_when_it_is_old(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what another run writes at this moment, and nothing of another name."""
    left = killed(source, target)
    copy = next(left)  # times of writing as old as the source's, times of change of now
    others = {"0.3-kl.tmp", "0.3-kl-seed-1.0123456789abcdef0123456789abcdef.tmp", "0.3-kl.mine.tmp"}
    for name in others:
        (target.parent / name).mkdir()
    with _replacing(source, target):
        assert copy.exists()
    assert names(target) == {"0.3-kl", copy.name, *others}
    now = time.time()
    monkeypatch.setattr(compress.time, "time", lambda: now + 2 * 3600)
    with _replacing(source, target):
        assert not copy.exists()
    assert names(target) == {"0.3-kl", *others}
