"""The demo's text: what every CPython carries.

The language reference in ``pydoc_data.topics`` and the source of the standard library, about 9 MB of English and code.
A document's split is decided by a hash of its name alone, so a held-out document stays held out under every Python.
"""

import hashlib
import importlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from storage.files import write_whole

SPLITS = ("train", "validation", "test")
EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "_bundled",
}
GENERATED = {"html/entities.py", "keyword.py", "locale.py", "token.py", "lib2to3/pgen2/token.py"}  # mostly tables


@dataclass(frozen=True, kw_only=True)
class Document:
    """One named text; ``split`` follows from the name."""

    name: str
    text: str

    @property
    def split(self) -> str:
        return split_of(self.name)


def split_of(name: str) -> str:
    """Returns the split of the document called ``name``: 90 % train, 5 % validation, 5 % test."""
    percent = int.from_bytes(_name_hash(name)[:8], "big") % 100
    return "test" if percent < 5 else "validation" if percent < 10 else "train"


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def python_documents() -> Iterator[Document]:
    """Yields the reference's topics, then the standard library's modules, each sorted by name."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        yield Document(name=f"reference/{name}", text=text)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _is_source(PurePosixPath(name)):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield Document(name=f"library/{name.as_posix()}", text=text)


def _is_source(name: PurePosixPath) -> bool:
    excluded = EXCLUDED_FOLDERS.intersection(name.parts[:-1]) or name.name.startswith(("_sysconfigdata", "test_"))
    return not excluded and str(name) not in GENERATED


def folder_documents(folder: Path) -> Iterator[Document]:
    """Yields every readable ``.txt``, ``.md``, ``.rst`` and ``.py`` file below ``folder``, sorted by name.

    Errors: ``ValueError`` if the folder holds no such file.
    """
    suffixes = {".txt", ".md", ".rst", ".py"}
    paths = sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    if not paths:
        raise ValueError(f"{folder} holds no text: expected files ending in {', '.join(sorted(suffixes))}")
    for path in paths:
        yield Document(
            name=path.relative_to(folder).as_posix(), text=path.read_text(encoding="utf-8", errors="replace")
        )


def write_demo_text(folder: str) -> dict[str, Path]:
    """Writes the demo's splits below ``folder``; a pull step of ``deploy/prefect.yaml``."""
    return write_splits(python_documents(), Path(folder))


def write_splits(documents: Iterator[Document], folder: Path) -> dict[str, Path]:
    """Writes one ``.jsonl`` a split below ``folder``, a ``{"name", "text"}`` a line; returns the three paths.

    Lines are in the order of the names' hashes, so that the beginning of a split is a fair sample of it.

    Errors: ``ValueError`` if a split comes out empty (too few documents to hold some out).
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    for document in sorted(documents, key=lambda document: _name_hash(document.name)):
        lines[document.split].append(json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False))
    empty = [split for split in SPLITS if not lines[split]]
    if empty:
        raise ValueError(
            f"no document fell into {' and '.join(empty)}: add more files, splits go by a hash of each name"
        )
    paths = {split: folder / f"{split}.jsonl" for split in SPLITS}
    for split, path in paths.items():
        text = "\n".join(lines[split]) + "\n"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # another run may be reading it
            write_whole(path, text)
    return paths
