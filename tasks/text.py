"""Text sources, and the token blocks that are cut from them."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from storage.digest import canonical_json, digest_bytes, digest_file
from storage.remembered import DigestMemory
from tasks.caching import Source
from tasks.hub import commit_of

Part = Literal["all", "calibration", "validation"]
PLAIN_SUFFIXES = {".txt", ".md", ".rst", ".py"}
SUFFIXES = PLAIN_SUFFIXES | {".jsonl", ".parquet"}
HELD_OUT_EVERY = 16  # one window in 16 belongs to the validation part of a source


class TextOrigin(Source):
    """Text at a local ``path`` or in a hub ``dataset`` at a commit; the digest covers content and way of reading."""

    path: str | None
    dataset: str | None
    config: str | None
    split: str
    revision: str | None
    field: str
    separator: str

    @property
    def name(self) -> str:
        return self.path or f"{self.dataset} ({self.split})"

    def current_digest(self) -> str:
        if self.path is None:  # a commit does not change
            return self.digest
        memory = DigestMemory()
        return find_text(path=Path(self.path), field=self.field, separator=self.separator, digest=memory.digest).digest

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "revision": self.revision, "field": self.field, "separator": self.separator}


def find_text(
    *,
    path: Path | None = None,
    dataset: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    field: str = "text",
    separator: str = "\n\n",
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
        files = _text_files(path)
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
        digest=digest_bytes(canonical_json(content | {"separator": separator}).encode()),
        lacks=lacks,
        path=None if path is None else str(path),
        dataset=dataset,
        config=config,
        split=split,
        revision=revision,
        field=field,
        separator=separator,
    )


def text_bytes(origin: TextOrigin) -> int:
    """Returns the size of a local text."""
    assert origin.path is not None
    return sum(file.stat().st_size for file in _text_files(Path(origin.path)))


def documents(origin: TextOrigin) -> Iterator[str]:
    """Yields the documents in their order in the source."""
    if origin.path is None:
        import datasets  # a second to import, and needed for hub datasets only

        rows = datasets.load_dataset(
            origin.dataset, origin.config, split=origin.split, revision=origin.revision, streaming=True
        )
        for row in rows:  # streamed: a source like C4 is never downloaded whole
            if origin.field not in row:
                raise ValueError(f"{origin.name} has no field {origin.field!r}, only {', '.join(row)}")
            yield row[origin.field]
        return
    for file in _text_files(Path(origin.path)):
        yield from _file_documents(file, origin.field)


def token_windows(
    origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, *, length: int, take: int, pool: int, part: Part, seed: int
) -> np.ndarray:  # -> (take, length) int64
    """Returns ``take`` windows of ``length`` tokens drawn, without overlap, from the first ``pool`` of ``part``.

    Every sixteenth window of a source is its validation part, the others its calibration part.
    Errors: ``ValueError`` with the counts if the text is too short.
    """
    chosen = list(islice(_windows_of(part, origin, tokenizer, length), pool))
    if len(chosen) < take:
        raise ValueError(
            f"{origin.name} gives {len(chosen)} {'' if part == 'all' else part + ' '}sequences of {length} tokens, "
            f"{take} are asked for: add text, ask for fewer sequences, or shorten them"
        )
    order = np.random.default_rng(seed).permutation(len(chosen))[:take]
    return np.stack([chosen[index] for index in order])


def joined_windows(
    origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, *, length: int, max_tokens: int | None, bos: str
) -> np.ndarray:  # -> (windows, length) int64
    """Returns the text, joined and tokenized once, as non-overlapping windows; a last incomplete window is left out.

    Errors: ``ValueError`` if there is not one window.
    """
    text = origin.separator.join(documents(origin))
    ids = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)[:max_tokens]
    start = _bos(tokenizer) if bos != "none" else None
    if start is not None and bos == "first":
        ids = np.concatenate([[start], ids])
    body = length - 1 if start is not None and bos == "every_window" else length
    count = len(ids) // body
    if count == 0:
        raise ValueError(
            f"{origin.name} gives {len(ids)} tokens, less than one window of {length}: add text or shorten the windows"
        )
    windows = ids[: count * body].reshape(count, body)
    return windows if body == length else np.concatenate([np.full((count, 1), start), windows], axis=1)


def _bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    start = tokenizer.bos_token_id
    return start if isinstance(start, int) else None


def _windows_of(
    part: Part, origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[np.ndarray]:
    for index, window in enumerate(_windows(origin, tokenizer, length)):
        held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if part == "all" or held_out == (part == "validation"):
            yield window


def _windows(origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[np.ndarray]:
    rest = np.empty(0, dtype=np.int64)
    for text in documents(origin):
        if not text:
            continue
        ids = np.asarray(
            tokenizer(text + origin.separator, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64
        )
        rest = np.concatenate([rest, ids])
        whole = len(rest) // length * length
        yield from rest[:whole].reshape(-1, length)
        rest = rest[whole:]


def _text_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"{path} holds no text: expected files ending in {', '.join(sorted(SUFFIXES))}")
        return files
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder to read text from")
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path}: text is read from files ending in {', '.join(sorted(SUFFIXES))}, or a folder of them"
        )
    return [path]


def _file_documents(file: Path, field: str) -> Iterator[str]:
    if file.suffix in PLAIN_SUFFIXES:
        yield file.read_text(encoding="utf-8", errors="replace")
    elif file.suffix == ".parquet":
        parquet = pyarrow.parquet.ParquetFile(file)
        if field not in parquet.schema_arrow.names:
            raise ValueError(f"{file} has no column {field!r}, only {', '.join(parquet.schema_arrow.names)}")
        kind = parquet.schema_arrow.field(field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"{file}: its column {field!r} holds {kind}, not text")
        for batch in parquet.iter_batches(columns=[field]):
            yield from batch.column(0).to_pylist()
    else:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_text(line, field, f"{file}, line {number}")


def _json_text(line: str, field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not a JSON object: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise ValueError(f"{place}: there is no text in field {field!r}")
    text: str = record[field]
    return text
