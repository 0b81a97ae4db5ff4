"""Something to publish."""

import uuid
from collections.abc import Mapping
from pathlib import Path

from storage.manifest import ArtifactRef, Lineage
from storage.store import Store

LINEAGE = Lineage(stage="gather", version=1, inputs={}, settings={}, packages={}, device="cpu", run=None, seconds=1.0)
FILES = {"a.bin": b"\x00\x01\x02" * 1000, "sub/b.json": b"{}", "empty": b""}


def make_folder(parent: Path, files: Mapping[str, bytes] = FILES) -> Path:
    """Returns a new folder with ``files``, below ``parent``."""
    folder = parent / uuid.uuid4().hex
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def publish(store: Store, parent: Path, key: str = "k1", files: Mapping[str, bytes] = FILES) -> ArtifactRef:
    """Publishes ``files`` as gather ``key``, from below ``parent``."""
    return store.publish("gather", key, make_folder(parent, files), LINEAGE)


def read(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
