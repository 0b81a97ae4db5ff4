"""The KL grid is resumed at the row where it stopped, reads as a data set, and equal grids make equal bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr

from storage.digest import digest_folder
from storage.grid import MEASURED, NEVER, SKIPPED, KLGrid, load_tokens, save_tokens

UNITS = ["blocks.0.q+k+v", "blocks.0.o", "blocks.1.größe"]
FRACTIONS = [0.25, 0.5, 0.75, 0.875]
REMOVED = np.arange(12).reshape(3, 4) + 2


def row(unit: int) -> tuple[np.ndarray, np.ndarray]:
    """KL and status of one row: as many points skipped as the unit's number says, all of them in the last row."""
    kl, status = np.array([0.1, 0.2, 0.3, 0.4]) * (unit + 1) / 3, np.full(4, MEASURED, dtype=np.uint8)
    skipped = slice(0, 4 if unit == 2 else unit)
    kl[skipped], status[skipped] = np.nan, SKIPPED
    return kl, status


def make(path: Path | str, *rows: int) -> KLGrid:
    grid = KLGrid.create(str(path), UNITS, REMOVED, FRACTIONS)
    for unit in rows:
        grid.write_row(unit, *row(unit))
    return grid


def test_a_finished_grid_opens_with_xarray(tmp_path: Path) -> None:
    make(tmp_path / "grid", 0, 1, 2).finish()
    with xarray.open_zarr(tmp_path / "grid", consolidated=True) as data:
        assert data["unit"].values.tolist() == UNITS
        assert data["fraction"].values.tolist() == FRACTIONS
        assert data["kl"].dtype == np.float64
        assert data["status"].dtype == np.uint8
        np.testing.assert_array_equal(data["removed"].values, REMOVED)
        for unit in range(3):
            kl, status = row(unit)
            np.testing.assert_array_equal(data["kl"].values[unit], kl)
            np.testing.assert_array_equal(data["status"].values[unit], status)
        xarray.testing.assert_identical(data.load(), KLGrid.open(str(tmp_path / "grid")).read())


def test_a_killed_run_goes_on_at_the_rows_without_status(tmp_path: Path) -> None:
    make(tmp_path / "grid", 1)
    reopened = KLGrid.open(str(tmp_path / "grid"))
    assert reopened.pending() == [0, 2]
    for unit in reopened.pending():
        reopened.write_row(unit, *row(unit))
    assert KLGrid.open(str(tmp_path / "grid")).pending() == []


def test_a_row_whose_points_are_all_skipped_is_not_pending(tmp_path: Path) -> None:
    assert make(tmp_path / "grid", 2).pending() == [0, 1]


def test_what_is_pending_is_found_without_reading_kl(tmp_path: Path) -> None:
    make(tmp_path / "grid", 0, 1)
    for chunk in (tmp_path / "grid" / "kl" / "c").rglob("*"):
        if chunk.is_file():
            chunk.write_bytes(b"not a chunk")
    assert KLGrid.open(str(tmp_path / "grid")).pending() == [2]


def test_status_is_written_after_kl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = make(tmp_path / "grid")
    write, names = zarr.Array.__setitem__, []

    def watch(array: zarr.Array[Any], *arguments: Any) -> None:
        names.append(array.basename)
        if array.basename == "status":
            raise KeyboardInterrupt
        write(array, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", watch)
        with pytest.raises(KeyboardInterrupt):
            grid.write_row(0, *row(0))
    assert names == ["kl", "status"]
    reopened = KLGrid.open(str(tmp_path / "grid"))
    assert reopened.pending() == [0, 1, 2]
    reopened.write_row(0, *row(0))
    assert reopened.pending() == [1, 2]


def test_a_chunk_is_one_whole_row(tmp_path: Path) -> None:
    make(tmp_path / "grid", 0, 1)
    for name in ("kl", "status"):
        assert zarr.open_array(tmp_path / "grid" / name, mode="r").chunks == (1, len(FRACTIONS))
        chunks = [path for path in (tmp_path / "grid" / name / "c").rglob("*") if path.is_file()]
        assert len(chunks) == 2


@pytest.mark.parametrize(
    ("kl", "status"),
    [
        (np.zeros(3), np.full(4, MEASURED)),
        (np.zeros(4), np.full(3, MEASURED)),
        (np.zeros((1, 4)), np.full((1, 4), MEASURED)),
        (np.zeros(4), np.array([MEASURED, MEASURED, NEVER, MEASURED])),
    ],
    ids=["short kl", "short status", "two dimensions", "a point without status"],
)
def test_a_row_that_is_not_whole_is_refused(kl: np.ndarray, status: np.ndarray, tmp_path: Path) -> None:
    grid = make(tmp_path / "grid")
    with pytest.raises(ValueError, match=r"row 1 .*4 points"):
        grid.write_row(1, kl, status)
    assert grid.pending() == [0, 1, 2]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_measured_point_that_is_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    grid = make(tmp_path / "grid")
    with pytest.raises(ValueError, match=r"row 0 .*not finite"):
        grid.write_row(0, np.array([0.1, value, 0.2, 0.3]), np.full(4, MEASURED))
    assert grid.pending() == [0, 1, 2]


def test_counts_and_names_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(3, 4\).*2 units"):
        KLGrid.create(str(tmp_path / "grid"), UNITS[:2], REMOVED, FRACTIONS)
    assert not (tmp_path / "grid").exists()


def test_a_grid_is_not_made_over_another(tmp_path: Path) -> None:
    make(tmp_path / "grid", 0)
    with pytest.raises(zarr.errors.ContainsGroupError):
        make(tmp_path / "grid")
    assert KLGrid.open(str(tmp_path / "grid")).pending() == [1, 2]


def test_equal_grids_make_equal_bytes_however_they_were_filled(tmp_path: Path) -> None:
    make(tmp_path / "straight", 0, 1, 2).finish()
    make(tmp_path / "resumed", 2, 0)
    resumed = KLGrid.open(str(tmp_path / "resumed"))
    resumed.write_row(1, *row(1))
    resumed.finish()
    KLGrid.open(str(tmp_path / "resumed")).finish()  # killed between finishing and publishing
    assert digest_folder(tmp_path / "straight") == digest_folder(tmp_path / "resumed")


def test_a_grid_lives_on_any_file_system() -> None:
    make("memory://grids/one", 0, 2)
    grid = KLGrid.open("memory://grids/one")
    assert grid.pending() == [1]
    grid.write_row(1, *row(1))
    grid.finish()
    assert grid.read().sizes == {"unit": 3, "fraction": 4}


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (300, 3)], ids=str)
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_token_blocks_come_back(shape: tuple[int, int], dtype: type, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, shape).astype(dtype)
    save_tokens(tmp_path, ids, {"source": "text"})
    np.testing.assert_array_equal(load_tokens(tmp_path), ids)


def test_equal_token_blocks_make_equal_bytes(tmp_path: Path) -> None:
    ids = np.arange(600).reshape(300, 2)
    for name, dtype in (("first", np.int64), ("second", np.int32)):
        (tmp_path / name).mkdir()
        save_tokens(tmp_path / name, ids.astype(dtype), {"seed": 1, "source": "text"})
    assert digest_folder(tmp_path / "first") == digest_folder(tmp_path / "second")


def test_a_status_that_means_nothing_is_refused(tmp_path: Path) -> None:
    grid = make(tmp_path / "grid")
    with pytest.raises(ValueError, match="each measured or skipped"):
        grid.write_row(0, np.zeros(4), np.full(4, 7))
    assert grid.pending() == [0, 1, 2]


@pytest.mark.parametrize("unit", [-1, 3])
def test_a_row_that_the_grid_has_not_is_refused(unit: int, tmp_path: Path) -> None:
    grid = make(tmp_path / "grid")
    with pytest.raises(IndexError, match=f"rows 0 to 2, not {unit}"):
        grid.write_row(unit, *row(0))
    assert grid.pending() == [0, 1, 2]


def test_an_unfinished_grid_reads_without_a_warning(tmp_path: Path) -> None:
    data = make(tmp_path / "grid", 0).read()
    np.testing.assert_array_equal(data["kl"].values[0], row(0)[0])
    assert np.isnan(data["kl"].values[1:]).all()
    assert (data["status"].values[1:] == NEVER).all()


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_token_ids_beyond_int32_are_refused(value: int, tmp_path: Path) -> None:
    with pytest.raises(OverflowError, match=str(value)):
        save_tokens(tmp_path, np.array([[0, value]]), {})
    assert list(tmp_path.iterdir()) == []
