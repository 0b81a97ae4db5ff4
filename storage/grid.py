"""The KL grid and the token blocks, on zarr v3.

The grid is a group over (unit, fraction): ``kl`` in nats per token, ``status`` (0 never, 1 measured, 2 skipped),
``removed`` counts, with both coordinates. A chunk is one row, and a row has one writer. ``status`` is written after
``kl``, so a row whose status is complete is complete. Opens with ``xarray.open_zarr``.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray
import zarr

NEVER, MEASURED, SKIPPED = 0, 1, 2


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

        Errors: ``ValueError`` if the shapes disagree, ``zarr.errors.ContainsGroupError`` if there is one already.
        """
        if removed.shape != (len(units), len(fractions)):
            raise ValueError(f"removed has shape {removed.shape} for {len(units)} units and {len(fractions)} points")
        group = zarr.create_group(path, zarr_format=3, overwrite=False)
        dimensions = ["unit", "fraction"]
        row = (1, max(1, len(fractions)))
        for name, dtype, fill in (("kl", "float64", np.nan), ("status", "uint8", NEVER)):
            group.create_array(
                name, shape=removed.shape, chunks=row, dtype=dtype, fill_value=fill, dimension_names=dimensions
            )
        group.create_array("removed", data=removed.astype(np.int64), chunks=removed.shape, dimension_names=dimensions)
        names = group.create_array("unit", shape=(len(units),), dtype="string", dimension_names=["unit"])
        names[:] = np.array(units, dtype=object)
        group.create_array("fraction", data=np.array(fractions, dtype=np.float64), dimension_names=["fraction"])
        return cls(path, group)

    @classmethod
    def open(cls, path: str) -> "KLGrid":
        """Opens a grid for reading and writing."""
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

    def pending(self) -> list[int]:
        """Returns the numbers of the rows that are still to be measured; reads ``status`` alone."""
        status = np.asarray(self._array("status")[:])
        return [int(row) for row in np.flatnonzero((status == NEVER).any(axis=1))]

    def finish(self) -> None:
        """Consolidates the metadata, once all rows are written."""
        with warnings.catch_warnings():  # it is not in the format's specification, which zarr-python says each time
            warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
            zarr.consolidate_metadata(self._group.store, zarr_format=3)

    def read(self) -> xarray.Dataset:
        """Returns the whole grid."""
        finished = self._group.metadata.consolidated_metadata is not None
        data: xarray.Dataset = xarray.open_zarr(self.path, consolidated=finished).load()
        return data

    def _array(self, name: str) -> Any:
        return self._group[name]


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
