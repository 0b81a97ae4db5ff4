"""The KL grid and the token blocks, on zarr v3.

The grid is a group over (unit, fraction): ``kl`` in nats per token, ``status`` (0 never, 1 measured, 2 skipped),
``removed`` counts, with both coordinates. While it is measured, a chunk is one row, and a row has one writer.
``status`` is written after ``kl``, in one piece and without a zero, so a row is whole if and only if it has a chunk of
``status``: names tell what is left. Once measured, it is compacted to one chunk an array. Every chunk carries its
checksum and none is compressed: damage is found, and equal grids have equal bytes anywhere. Opens with
``xarray.open_zarr``.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import xarray
import zarr
from fsspec.implementations.local import LocalFileSystem
from zarr.codecs import Crc32cCodec

NEVER, MEASURED, SKIPPED = 0, 1, 2
CODECS = (Crc32cCodec(),)


class KLGrid:
    """The grid at ``path``, a folder or an fsspec URI."""

    def __init__(self, path: str, group: zarr.Group) -> None:
        self.path = path
        self._group = group

    @classmethod
    def create(
        cls, path: str, units: Sequence[str], removed: npt.NDArray[np.int64], fractions: Sequence[float]
    ) -> "KLGrid":
        """Makes an empty grid; ``removed`` (unit, point) holds the counts.

        Errors: ``ValueError`` if the shapes disagree or there is no unit or no point,
        ``zarr.errors.ContainsGroupError`` if there is a grid already.
        """
        if not units or not fractions:
            raise ValueError(f"a grid of {len(units)} units and {len(fractions)} points measures nothing")
        if removed.shape != (len(units), len(fractions)):
            raise ValueError(f"removed has shape {removed.shape} for {len(units)} units and {len(fractions)} points")
        path = _absolute(path)
        group = zarr.create_group(path, zarr_format=3, overwrite=False)
        whole, row = removed.shape, (1, len(fractions))
        both, (unit, fraction) = ["unit", "fraction"], (["unit"], ["fraction"])
        _add(group, "kl", whole, row, "float64", np.nan, both)
        _add(group, "status", whole, row, "uint8", NEVER, both)
        _add(group, "removed", whole, whole, "int64", 0, both)[:] = removed
        _add(group, "unit", whole[:1], whole[:1], "string", "", unit)[:] = np.array(units, dtype=object)
        _add(group, "fraction", whole[1:], whole[1:], "float64", 0.0, fraction)[:] = np.array(fractions)
        return cls(path, group)

    @classmethod
    def open(cls, path: str) -> "KLGrid":
        """Opens a grid for reading and writing."""
        path = _absolute(path)
        return cls(path, zarr.open_group(path, mode="r+"))

    def write_row(self, unit: int, kl: npt.NDArray[np.float64], status: npt.NDArray[np.uint8]) -> None:
        """Writes the row of unit number ``unit``: first its ``kl`` (point,), then its ``status`` (point,).

        Errors: ``ValueError`` if the row is not whole or a measured point is not finite, ``IndexError`` if there is no
        such row.
        """
        array = self._array("kl")
        if not 0 <= unit < array.shape[0]:
            raise IndexError(f"the grid has rows 0 to {array.shape[0] - 1}, not {unit}")
        whole = kl.shape == status.shape == array.shape[1:]
        if not whole or not np.isin(status, (MEASURED, SKIPPED)).all():
            raise ValueError(f"row {unit} of the grid must be whole: {array.shape[1]} points, each measured or skipped")
        if not np.isfinite(kl[status == MEASURED]).all():
            raise ValueError(f"row {unit} of the grid holds a measured KL that is not finite")
        assert array.chunks == (1, array.shape[1]), "a chunk must hold whole rows of one writer"
        array[unit] = kl
        self._array("status")[unit] = status

    @staticmethod
    def folders_of(unit: int) -> tuple[str, str]:
        """Returns the folders, relative to the grid's, with the chunks of a row of a grid in the making."""
        return f"kl/c/{unit}", f"status/c/{unit}"

    def describes(self, units: Sequence[str], removed: npt.NDArray[np.int64]) -> bool:
        """Returns whether this is the grid of these units and counts (unit, point)."""
        return self._values("unit").tolist() == list(units) and np.array_equal(self._values("removed"), removed)

    def pending(self) -> list[int]:
        """Returns the numbers of the rows that are still to be measured, by the names of what is there; reads none."""
        status = self._array("status")
        rows, points = status.shape
        assert status.chunks == (1, points), f"{self.path} is no grid in the making: its chunks are {status.chunks}"
        assert status.metadata.encode_chunk_key((7, 0)) == "c/7/0", "the name of a chunk must tell its row"
        fs, root = fsspec.core.url_to_fs(self.path)
        fs.invalidate_cache()
        names = fs.find(f"{root}/status/c")
        whole = {int(match[1]) for name in names if (match := re.search(r"/status/c/(\d+)/0$", name))}
        return [row for row in range(rows) if row not in whole]

    def compact(self, target: str) -> None:
        """Writes the measured grid to ``target``, a new or empty folder or an fsspec URI, in one chunk an array.

        Errors: ``ValueError`` naming the rows that are not measured or damaged, before anything is written;
        ``zarr.errors.ContainsGroupError`` if ``target`` holds a grid already.
        """
        values = {name: self._values(name) for name in sorted(self._group.array_keys())}
        status, kl = values["status"], values["kl"]
        bad = ~np.isin(status, (MEASURED, SKIPPED)) | ((status == MEASURED) & ~np.isfinite(kl))
        if bad.any():
            raise ValueError(f"{self.path}: rows that are not whole: {_listed(np.flatnonzero(bad.any(axis=1)))}")
        group = zarr.create_group(_absolute(target), zarr_format=3, attributes=dict(self._group.attrs))
        for name, content in values.items():
            old = self._array(name)
            kind, names = old.metadata.data_type, old.metadata.dimension_names
            new = _add(group, name, old.shape, old.shape, kind, old.fill_value, names, dict(old.attrs))
            new[:] = content
        with warnings.catch_warnings():  # it is not in the format's specification, which zarr-python says each time
            warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
            zarr.consolidate_metadata(group.store, zarr_format=3)

    def _values(self, name: str) -> npt.NDArray[Any]:
        """Returns a whole array. Errors: ``ValueError`` naming it, and the rows whose chunks are damaged."""
        array = self._array(name)
        try:
            return np.asarray(array[:])
        except ValueError as error:
            problem = f"{self.path}: the chunks of {name} are damaged ({error})"
        if array.chunks == array.shape:
            raise ValueError(problem)
        raise ValueError(f"{problem}, of rows {_listed([r for r in range(array.shape[0]) if _is_damaged(array, r)])}")

    def read(self) -> xarray.Dataset:
        """Returns the whole grid."""
        finished = self._group.metadata.consolidated_metadata is not None
        data: xarray.Dataset = xarray.open_zarr(self.path, consolidated=finished).load()
        return data

    def _array(self, name: str) -> Any:
        return self._group[name]


def _absolute(path: str) -> str:
    """Returns a local path or URI as an absolute path, where zarr writes each chunk at once, or any other URI as is."""
    fs, root = fsspec.core.url_to_fs(path)
    return str(root) if isinstance(fs, LocalFileSystem) else path


def _add(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: Any,
    fill: Any,
    dimensions: Sequence[str],
    attributes: dict[str, Any] | None = None,
) -> Any:
    return group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=fill,
        dimension_names=dimensions,
        compressors=CODECS,
        attributes=attributes,
    )


def _is_damaged(array: Any, row: int) -> bool:
    try:
        array[row]
    except ValueError:
        return True
    return False


def _listed(rows: Sequence[int] | npt.NDArray[np.intp]) -> str:
    return ", ".join(str(row) for row in rows[:10]) + (f", ... ({len(rows)} in all)" if len(rows) > 10 else "")


def save_tokens(folder: Path, ids: npt.NDArray[Any], attributes: Mapping[str, Any] | None = None) -> None:
    """Writes token blocks (sequence, position) below ``folder``.

    Errors: ``OverflowError`` for an id beyond int32.
    """
    if ids.size and not np.iinfo(np.int32).min <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
        raise OverflowError(f"token ids from {ids.min()} to {ids.max()} do not fit int32")
    group = zarr.create_group(str(folder / "tokens"), zarr_format=3, attributes=dict(attributes or {}))
    chunks = (min(len(ids), 256), ids.shape[1])
    group.create_array("ids", data=ids.astype(np.int32), chunks=chunks, dimension_names=["sequence", "position"])


def load_tokens(folder: Path) -> npt.NDArray[np.int32]:
    """Returns the token blocks (sequence, position) below ``folder``."""
    group: Any = zarr.open_group(str(folder / "tokens"), mode="r")
    return np.asarray(group["ids"][:])


def tokens_shape(folder: Path) -> tuple[int, int]:
    """Returns how many sequences of how many tokens lie below ``folder``, from the metadata alone."""
    group: Any = zarr.open_group(str(folder / "tokens"), mode="r")
    sequences, length = group["ids"].shape
    return sequences, length
