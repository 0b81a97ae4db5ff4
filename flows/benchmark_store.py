"""What caching costs: digests against ``sha256sum``, remembered digests, and finding what is left of a large grid."""

import logging
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import zarr

from storage.digest import digest_file, digest_folder
from storage.grid import MEASURED, NEVER, KLGrid
from storage.remembered import SETTLED_NS, DigestMemory

log = logging.getLogger(__name__)

PIECE = 16 << 20
RUNS = 3


def store(*, file_bytes: int = 1 << 30, rows: int = 10_000, points: int = 7, left: int = 10) -> dict[str, Any]:
    """Returns the figures for a file of random bytes and for a grid with all but ``left`` rows written.

    Each time is the median of ``RUNS`` alternating runs with the file in memory; GB are 10^9 bytes. Errors:
    ``FileNotFoundError`` where there is no ``sha256sum``.
    """
    with TemporaryDirectory(prefix="lsp-benchmark-") as folder:
        log.info("digests of a file of %.2f GB", file_bytes / 1e9)
        digests = _digests(_random_file(Path(folder) / "data" / "weights", file_bytes), Path(folder) / "memory")
    with TemporaryDirectory(prefix="lsp-benchmark-") as folder:
        log.info("writing a grid of %d rows", rows)
        return {"benchmark": "store"} | digests | _grid(f"{folder}/grid", rows, points, left)


def _random_file(path: Path, size: int) -> Path:
    path.parent.mkdir()
    with path.open("wb") as file:
        for start in range(0, size, PIECE):
            file.write(os.urandom(min(PIECE, size - start)))
    return path


def _digests(path: Path, memory_folder: Path) -> dict[str, Any]:
    arms: dict[str, Callable[[], str]] = {
        "sha256sum": lambda: _sha256sum(path),
        "digest_file": lambda: digest_file(path),
        "digest_folder": lambda: digest_folder(path.parent)[1][path.name][0],
    }
    expected = _sha256sum(path)  # which also brings the file into memory
    seconds = _medians(arms, expected)
    while time.time_ns() - path.stat().st_ctime_ns <= SETTLED_NS:  # a younger file is not remembered
        time.sleep(0.1)
    memory = DigestMemory(memory_folder)
    first = _timed(lambda: memory.digest(path), expected)
    again = _medians({"remembered": lambda: memory.digest(path)}, expected)["remembered"]
    size = path.stat().st_size
    return {
        "digests": [
            {"name": name, "seconds": spent, "GB/s": size / 1e9 / spent, "ratio": seconds["sha256sum"] / spent}
            for name, spent in seconds.items()
        ],
        "digest_ratio": seconds["sha256sum"] / max(seconds["digest_file"], seconds["digest_folder"]),
        "memory": [{"name": "first", "ms": first * 1e3}, {"name": "remembered", "ms": again * 1e3}],
    }


def _sha256sum(path: Path) -> str:
    return subprocess.run(["sha256sum", str(path)], check=True, capture_output=True, text=True).stdout.split()[0]


def _grid(path: str, rows: int, points: int, left: int) -> dict[str, Any]:
    missing = np.linspace(0, rows - 1, left, dtype=int).tolist()
    started = time.perf_counter()
    _write_grid(path, rows, points, missing)
    writing = time.perf_counter() - started
    arms = {
        "names of chunks": lambda: KLGrid.open(path).pending(),
        "reading status": lambda: _pending_by_status(path),
    }
    seconds = _medians(arms, missing)
    return {
        "grid": [{"name": name, "rows": rows, "left": left, "seconds": spent} for name, spent in seconds.items()],
        "grid_rows": rows,
        "grid_rows_left": ", ".join(str(row) for row in KLGrid.open(path).pending()),
        "grid_seconds": seconds["names of chunks"],
        "grid_ratio": seconds["reading status"] / seconds["names of chunks"],
        "grid_writing_seconds": writing,
    }


def _write_grid(path: str, rows: int, points: int, missing: list[int]) -> None:
    """Writes a grid as a killed run leaves it: chunk by chunk, with none of ``status`` for the rows in ``missing``."""
    removed = np.tile(np.arange(1, points + 1), (rows, 1))
    KLGrid.create(
        path, [f"unit {row}" for row in range(rows)], removed, [i / (points + 1) for i in range(1, points + 1)]
    )
    status = np.full((rows, points), MEASURED, dtype=np.uint8)
    status[missing] = NEVER  # zarr stores no chunk that holds the fill value alone
    group: Any = zarr.open_group(path, mode="r+")
    group["kl"][:] = np.random.default_rng(0).random((rows, points))
    group["status"][:] = status


def _pending_by_status(path: str) -> list[int]:
    group: Any = zarr.open_group(path, mode="r")
    rows: list[int] = np.flatnonzero((group["status"][:] == NEVER).any(axis=1)).tolist()
    return rows


def _medians(arms: dict[str, Callable[[], Any]], expected: Any) -> dict[str, float]:
    """Returns the median seconds of each of ``arms``, run in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(RUNS):
        for name, function in arms.items():
            seconds[name].append(_timed(function, expected))
    return {name: statistics.median(times) for name, times in seconds.items()}


def _timed(function: Callable[[], Any], expected: Any) -> float:
    """Returns the seconds of a call, whose result must be ``expected``."""
    started = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - started
    assert result == expected, f"{result} instead of {expected}"
    return seconds
