"""Text sources: found, digested, and read document by document."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from storage.digest import canonical_json, digest_bytes, digest_file
from storage.remembered import DigestMemory
from tasks.caching import Source
from tasks.chat import checked_messages, rendered
from tasks.hub import commit_of

Format = Literal["text", "chat"]
Part = Literal["all", "calibration", "validation"]
PLAIN_SUFFIXES = {".txt", ".md", ".rst", ".py"}
SUFFIXES = PLAIN_SUFFIXES | {".jsonl", ".parquet"}
HELD_OUT_EVERY = 16  # one sequence in 16 belongs to the validation part of a source
BLANK_LINES = re.compile(r"\n\s*\n")  # between paragraphs


class TextOrigin(Source):
    """Text at a local ``path`` or in a hub ``dataset`` at a commit; the digest covers content and way of reading."""

    path: str | None
    dataset: str | None
    config: str | None
    split: str
    revision: str | None
    field: str
    separator: str
    format: Format = "text"
    label_field: str | None = None

    @property
    def name(self) -> str:
        return self.path or f"{self.dataset} ({self.split})"

    def current_digest(self) -> str:
        if self.path is None:  # a commit does not change
            return self.digest
        now = find_text(
            path=Path(self.path),
            field=self.field,
            separator=self.separator,
            format=self.format,
            label_field=self.label_field,
            digest=DigestMemory().digest,
        )
        return now.digest

    def facts(self) -> dict[str, Any]:
        told = {"name": self.name, "revision": self.revision, "field": self.field, "separator": self.separator}
        return told | _told(self.format, self.label_field)


def find_text(
    *,
    path: Path | None = None,
    dataset: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    field: str = "text",
    separator: str = "\n\n",
    format: Format = "text",
    label_field: str | None = None,
    digest: Callable[[Path], str] = digest_file,
    partly: bool = False,
) -> TextOrigin:
    """Returns a text source with its content digested (local) or its revision resolved to a commit (hub).

    ``digest``: what a file's digest is taken from. ``partly``: a hub out of reach is named in ``lacks``.
    Errors: ``ValueError`` if it does not exist or is of an unknown kind.
    """
    lacks = None
    if path is not None:
        path = path.expanduser()
        files = _text_files(path, format)
        names = {file.relative_to(path).as_posix() if file != path else file.suffix: digest(file) for file in files}
        has_fields = any(file.suffix not in PLAIN_SUFFIXES for file in files)
        content: dict[str, object] = {"files": names, "field": field if has_fields else None}
    else:
        assert dataset is not None
        try:
            revision = commit_of("dataset", dataset, revision)
        except ConnectionError:
            if not partly:
                raise
            lacks = f"the hub tells the commit of {dataset}"
        content = {"dataset": dataset, "config": config, "split": split, "revision": revision, "field": field}
    return TextOrigin(
        digest=digest_bytes(canonical_json(content | {"separator": separator} | _told(format, label_field)).encode()),
        lacks=lacks,
        path=None if path is None else str(path),
        dataset=dataset,
        config=config,
        split=split,
        revision=revision,
        field=field,
        separator=separator,
        format=format,
        label_field=label_field,
    )


def text_bytes(origin: TextOrigin) -> int:
    """Returns the size of a local text."""
    assert origin.path is not None
    return sum(file.stat().st_size for file in _text_files(Path(origin.path), origin.format))


def documents(origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, *, paragraphs: bool = False) -> Iterator[str]:
    """Yields the documents in their order in the source; a conversation as the chat template of ``tokenizer`` has it.

    ``paragraphs``: each paragraph of a plain file is a document. Errors: ``ValueError`` naming file and line or row.
    """
    for place, value in _rows(origin, origin.field, paragraphs=paragraphs):
        if origin.format == "chat":
            yield rendered(checked_messages(value, origin.field, place), tokenizer, place)
        elif isinstance(value, str):
            yield value
        else:
            raise ValueError(f"{place}: there is no text in field {origin.field!r}")


def labelled_documents(origin: TextOrigin, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str, Any]]:
    """Yields place, text and label of each record. Errors: as ``documents``; ``ValueError`` for plain text."""
    assert origin.label_field is not None
    if origin.path is not None:
        plain = [file for file in _text_files(Path(origin.path), origin.format) if file.suffix in PLAIN_SUFFIXES]
        if plain:
            raise ValueError(f"{plain[0]} is plain text and has no labels: give .jsonl or .parquet files")
    labels = _rows(origin, origin.label_field)
    for text, (place, label) in zip(documents(origin, tokenizer), labels, strict=True):
        if not isinstance(label, (int, str)):
            raise ValueError(f"{place}: there is no label in field {origin.label_field!r}")
        yield place, text, label


def _told(format: Format, label_field: str | None) -> dict[str, str]:
    """Returns what digest and facts say of format and label: nothing of plain text, as if there were no other."""
    told = {} if format == "text" else {"format": str(format)}
    return told if label_field is None else told | {"label_field": label_field}


def _rows(origin: TextOrigin, field: str, *, paragraphs: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields place and value of one field of every record."""
    return _hub_rows(origin, field) if origin.path is None else _file_rows(origin, field, paragraphs)


def _hub_rows(origin: TextOrigin, field: str) -> Iterator[tuple[str, Any]]:
    import datasets  # a second to import, and needed for hub datasets only

    rows = datasets.load_dataset(
        origin.dataset, origin.config, split=origin.split, revision=origin.revision, streaming=True
    )
    for number, row in enumerate(rows, 1):  # streamed: a source like C4 is never downloaded whole
        if field not in row:
            raise ValueError(f"{origin.name} has no field {field!r}, only {', '.join(row)}")
        yield f"{origin.name}, row {number}", _present(row[field], origin, field)


def _file_rows(origin: TextOrigin, field: str, paragraphs: bool) -> Iterator[tuple[str, Any]]:
    assert origin.path is not None
    for file in _text_files(Path(origin.path), origin.format):
        if file.suffix in PLAIN_SUFFIXES:
            text = file.read_text(encoding="utf-8", errors="replace")
            for part in BLANK_LINES.split(text) if paragraphs else [text]:
                yield str(file), part
        elif file.suffix == ".parquet":
            yield from _parquet_rows(file, origin, field)
        else:
            yield from _json_rows(file, field)


def _text_files(path: Path, format: Format) -> list[Path]:
    suffixes = SUFFIXES if format == "text" else SUFFIXES - PLAIN_SUFFIXES
    kinds = ", ".join(sorted(suffixes))
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        if not files:
            raise ValueError(f"{path} holds no {format}: expected files ending in {kinds}")
        return files
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder to read {format} from")
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: {format} is read from files ending in {kinds}, or a folder of them")
    return [path]


def _parquet_rows(file: Path, origin: TextOrigin, field: str) -> Iterator[tuple[str, Any]]:
    parquet = pyarrow.parquet.ParquetFile(file)
    if field not in parquet.schema_arrow.names:
        raise ValueError(f"{file} has no column {field!r}, only {', '.join(parquet.schema_arrow.names)}")
    kind = parquet.schema_arrow.field(field).type
    if (
        field == origin.field
        and origin.format == "text"
        and not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))
    ):
        raise ValueError(f"{file}: its column {field!r} holds {kind}, not text")
    number = 0
    for batch in parquet.iter_batches(columns=[field]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield f"{file}, row {number}", _present(value, origin, field)


def _present(value: Any, origin: TextOrigin, field: str) -> Any:
    """Returns what a row holds: an empty text where it holds none."""
    return "" if value is None and field == origin.field and origin.format == "text" else value


def _json_rows(file: Path, field: str) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: not a JSON object: {error}") from None
            yield place, record.get(field) if isinstance(record, dict) else None
