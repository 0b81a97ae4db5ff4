"""The KL grid is resumed at the row where it stopped, reads as a data set, and equal grids make equal bytes."""

import shutil
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
    make(tmp_path / "work", 0, 1, 2).compact(str(tmp_path / "grid"))
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


def spoil(array: Path, content: bytes = b"not a chunk") -> list[Path]:
    """Overwrites all chunks of an array, and returns them."""
    chunks = [path for path in (array / "c").rglob("*") if path.is_file()]
    for chunk in chunks:
        chunk.write_bytes(content)
    return chunks


def test_what_is_pending_is_found_without_reading_a_chunk(tmp_path: Path) -> None:
    make(tmp_path / "grid", 0, 1)
    assert len(spoil(tmp_path / "grid" / "kl")) == len(spoil(tmp_path / "grid" / "status")) == 2
    assert KLGrid.open(str(tmp_path / "grid")).pending() == [2]


@pytest.mark.parametrize("place", ["{}", "file://{}", "memory://{}"])
def test_what_is_pending_is_found_wherever_the_grid_lies(place: str, tmp_path: Path) -> None:
    path = place.format(tmp_path / "status" / "c" / "2" / "0")  # a name that looks like a chunk's
    grid = make(path)
    assert grid.pending() == [0, 1, 2]
    for unit, left in ((2, [0, 1]), (0, [1]), (1, [])):
        grid.write_row(unit, *row(unit))
        assert grid.pending() == KLGrid.open(path).pending() == left


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grid = make("grid", 0)
    monkeypatch.chdir("/")
    assert grid.pending() == [1, 2]


def test_a_chunk_that_was_not_written_to_its_end_counts_for_nothing(tmp_path: Path) -> None:
    grid = make(tmp_path / "grid", 0)
    (tmp_path / "grid" / "status" / "c" / "1").mkdir()
    (tmp_path / "grid" / "status" / "c" / "1" / "0.3f2a.partial").write_bytes(b"half")
    assert grid.pending() == [1, 2]


@pytest.mark.parametrize("points", [1, 7])
def test_what_is_left_of_many_rows_is_the_rows_that_the_status_says(points: int, tmp_path: Path) -> None:
    rows, random = 250, np.random.default_rng(0)
    names = [f"unit {number}" for number in range(rows)]
    grid = KLGrid.create(str(tmp_path / "grid"), names, np.ones((rows, points), dtype=np.int64), [0.5] * points)
    done = random.permutation(rows)[:140]
    for unit in done.tolist():
        grid.write_row(unit, np.ones(points), random.integers(MEASURED, SKIPPED + 1, points).astype(np.uint8))
    status = zarr.open_array(tmp_path / "grid" / "status", mode="r")[:]
    assert grid.pending() == np.flatnonzero((np.asarray(status) == NEVER).any(axis=1)).tolist()
    assert len(grid.pending()) == 110


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
    assert grid.pending() == [0, 1, 2]
    grid.write_row(0, *row(0))
    assert grid.pending() == [1, 2]


def test_a_chunk_is_one_whole_row(tmp_path: Path) -> None:
    make(tmp_path / "grid", 0, 1)
    for name in ("kl", "status"):
        assert zarr.open_array(tmp_path / "grid" / name, mode="r").chunks == (1, len(FRACTIONS))
        chunks = [path for path in (tmp_path / "grid" / name / "c").rglob("*") if path.is_file()]
        assert len(chunks) == 2


@pytest.mark.parametrize("place", ["{}", "memory://{}"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_compact_grid_is_the_same_data_in_one_chunk_an_array(place: str, exists: bool, tmp_path: Path) -> None:
    source, target = (place.format(tmp_path / name) for name in ("work", "grid"))
    if exists:
        (tmp_path / "grid").mkdir()
    grid = make(source, 0, 1, 2)
    grid._group.attrs["about"] = {"model": "größe"}
    grid._array("kl").attrs["unit"] = "nats per token"
    grid.compact(target)
    before, after = zarr.open_group(source, mode="r"), zarr.open_group(target, mode="r")
    assert dict(after.attrs) == {"about": {"model": "größe"}}
    assert sorted(after.array_keys()) == ["fraction", "kl", "removed", "status", "unit"]
    for name, array in after.arrays():
        old = before[name]
        assert isinstance(old, zarr.Array)
        assert array.chunks == array.shape == old.shape
        assert array.dtype == old.dtype
        assert array.metadata.dimension_names == old.metadata.dimension_names
        assert dict(array.attrs) == dict(old.attrs)
        np.testing.assert_array_equal(array.fill_value, old.fill_value)
        np.testing.assert_array_equal(array[:], old[:])
    assert KLGrid.open(source).read().identical(KLGrid.open(target).read())
    assert after.metadata.consolidated_metadata is not None


def test_a_compact_grid_has_as_many_files_as_arrays_and_groups_whatever_its_rows(tmp_path: Path) -> None:
    make(tmp_path / "work", 0, 1, 2).compact(str(tmp_path / "grid"))
    assert len([path for path in (tmp_path / "grid").rglob("*") if path.is_file()]) == 1 + 2 * 5


def test_a_compact_grid_is_not_written_to(tmp_path: Path) -> None:
    make(tmp_path / "work", 0, 1, 2).compact(str(tmp_path / "grid"))
    grid = KLGrid.open(str(tmp_path / "grid"))
    with pytest.raises(AssertionError, match="one writer"):
        grid.write_row(0, *row(0))
    with pytest.raises(AssertionError, match="no grid in the making"):
        grid.pending()


def test_a_grid_with_rows_left_is_not_compacted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows that are not whole: 0, 2$"):
        make(tmp_path / "work", 1).compact(str(tmp_path / "grid"))
    assert not (tmp_path / "grid").exists()


def test_a_grid_is_not_compacted_over_another(tmp_path: Path) -> None:
    grid = make(tmp_path / "work", 0, 1, 2)
    grid.compact(str(tmp_path / "grid"))
    with pytest.raises(zarr.errors.ContainsGroupError):
        grid.compact(str(tmp_path / "grid"))


@pytest.mark.parametrize("name", ["kl", "status"])
def test_a_row_with_any_byte_flipped_or_lost_is_named(name: str, tmp_path: Path) -> None:
    grid = make(tmp_path / "work", 0, 1, 2)
    chunk = tmp_path / "work" / name / "c" / "1" / "0"
    whole = chunk.read_bytes()
    damaged = [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole))]
    for content in [*damaged, *(whole[:length] for length in range(len(whole))), bytes(4), bytes(len(whole))]:
        chunk.write_bytes(content)
        assert grid.pending() == []
        with pytest.raises(ValueError, match=rf"the chunks of {name} are damaged .*, of rows 1$"):
            grid.compact(str(tmp_path / "grid"))
    chunk.unlink()
    with pytest.raises(ValueError, match=r"rows that are not whole: 1$"):
        grid.compact(str(tmp_path / "grid"))
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize("name", ["removed", "unit", "fraction"])
@pytest.mark.parametrize("content", [b"", b"not a chunk", bytes(4)])
def test_damaged_names_or_counts_are_not_compacted(name: str, content: bytes, tmp_path: Path) -> None:
    grid = make(tmp_path / "work", 0, 1, 2)
    assert len(spoil(tmp_path / "work" / name, content)) == 1
    with pytest.raises(ValueError, match=f"the chunks of {name} are damaged"):
        grid.compact(str(tmp_path / "grid"))
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize(("name", "value"), [("status", NEVER), ("status", 7), ("kl", np.nan)])
def test_a_status_or_kl_that_no_row_can_hold_is_not_compacted(name: str, value: float, tmp_path: Path) -> None:
    grid = make(tmp_path / "work", 0, 1, 2)
    zarr.open_array(tmp_path / "work" / name, mode="r+")[1, 3] = value
    assert grid.pending() == []
    with pytest.raises(ValueError, match=r"rows that are not whole: 1$"):
        grid.compact(str(tmp_path / "grid"))


@pytest.mark.parametrize("name", ["kl", "status", "removed", "unit", "fraction"])
def test_a_flipped_byte_of_a_compact_grid_is_found_when_it_is_read(name: str, tmp_path: Path) -> None:
    make(tmp_path / "work", 0, 1, 2).compact(str(tmp_path / "grid"))
    (chunk,) = [path for path in (tmp_path / "grid" / name / "c").rglob("*") if path.is_file()]
    whole = chunk.read_bytes()
    for place in range(len(whole)):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="checksum"):
            KLGrid.open(str(tmp_path / "grid")).read()


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


@pytest.mark.parametrize(("units", "points"), [(0, 4), (3, 0)])
def test_a_grid_of_nothing_is_refused(units: int, points: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{units} units and {points} points"):
        KLGrid.create(str(tmp_path / "grid"), UNITS[:units], np.zeros((units, points), dtype=int), FRACTIONS[:points])
    assert not (tmp_path / "grid").exists()


def test_a_grid_is_not_made_over_another(tmp_path: Path) -> None:
    make(tmp_path / "grid", 0)
    with pytest.raises(zarr.errors.ContainsGroupError):
        make(tmp_path / "grid")
    assert KLGrid.open(str(tmp_path / "grid")).pending() == [1, 2]


def test_equal_grids_make_equal_bytes_however_they_were_filled(tmp_path: Path) -> None:
    make(tmp_path / "straight", 0, 1, 2).compact(str(tmp_path / "first"))
    make(tmp_path / "resumed", 2, 0)
    resumed = KLGrid.open(str(tmp_path / "resumed"))
    resumed.write_row(1, *row(1))
    resumed.compact(str(tmp_path / "second"))
    shutil.copytree(tmp_path / "resumed", tmp_path / "moved")
    KLGrid.open(str(tmp_path / "moved")).compact(str(tmp_path / "third"))  # killed while it was compacted
    digests = [digest_folder(tmp_path / name) for name in ("first", "second", "third")]
    assert digests[0] == digests[1] == digests[2]


def test_a_grid_lives_on_any_file_system() -> None:
    make("memory://grids/one", 0, 2)
    grid = KLGrid.open("memory://grids/one")
    assert grid.pending() == [1]
    grid.write_row(1, *row(1))
    grid.compact("memory://grids/two")
    assert KLGrid.open("memory://grids/two").read().identical(grid.read())


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


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_token_ids_beyond_int32_are_refused(value: int, tmp_path: Path) -> None:
    with pytest.raises(OverflowError, match=str(value)):
        save_tokens(tmp_path, np.array([[0, value]]), {})
    assert list(tmp_path.iterdir()) == []
