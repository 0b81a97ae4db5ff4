"""A small disk of its own, to be filled."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(disk: Path, kib: int) -> Iterator[None]:
    """Mounts a disk of ``kib`` KiB at the new folder ``disk``; skips the test where that is not allowed."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no small disk can be mounted: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, *, but: int = 0) -> Path:
    """Leaves ``but`` bytes free on ``disk``, in whole pages; returns the file to delete to have room again."""
    filler = disk / "filler"
    page = os.statvfs(disk).f_bsize
    with filler.open("wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail > but // page:
            file.write(b"0" * page)
    return filler
