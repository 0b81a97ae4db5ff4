"""The token blocks that are cut from texts: windows of a running text, or documents padded to one length."""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from tasks.text import HELD_OUT_EVERY, Part, TextOrigin, documents

Packing = Literal["windows", "documents"]


def draw(
    origin: TextOrigin,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    take: int,
    pool: int,
    part: Part,
    seed: int,
    packing: Packing = "windows",
) -> np.ndarray:  # -> (take, length) int64
    """Returns ``take`` sequences of ``length`` tokens drawn, without overlap, from the first ``pool`` of ``part``.

    Every sixteenth sequence of a source is its validation part, the others its calibration part. ``packing``: windows
    of the running text, or one document a sequence (``document_rows``).
    Errors: ``ValueError`` with the counts if the text is too short.
    """
    chosen = list(islice(_part_of(part, _sequences(origin, tokenizer, length, packing)), pool))
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

    ``bos`` adds no beginning-of-sequence token to one that a chat template has written.
    Errors: ``ValueError`` if there is not one window.
    """
    text = origin.separator.join(documents(origin, tokenizer))
    ids = _ids(tokenizer, text)[:max_tokens]
    start = _bos(tokenizer) if bos != "none" else None
    if start is not None and origin.format == "chat" and ids[:1].tolist() == [start]:
        ids = ids[1:]
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


def all_documents(
    origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, *, length: int, max_tokens: int | None
) -> np.ndarray:  # -> (rows, length) int64
    """Returns the rows of every document, in their order, as long as they hold ``max_tokens`` without the padding.

    Errors: ``ValueError`` if there is not one row.
    """
    rows, tokens = [], 0
    for row in document_rows(origin, tokenizer, length):
        tokens += int((row != tokenizer.pad_token_id).sum())
        if max_tokens is not None and tokens > max_tokens:
            break
        rows.append(row)
    if not rows:
        limit = "" if max_tokens is None else f" of at most {max_tokens} tokens"
        raise ValueError(f"{origin.name} gives no document{limit}: add text or raise the limit")
    return np.stack(rows)


def document_rows(origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[np.ndarray]:
    """Yields the documents as rows of ``length`` tokens: cut into pieces, each with special tokens around, and padded.

    A document is a record, of a plain file a paragraph; one without tokens gives no row.
    Errors: ``ValueError`` if the tokenizer has no padding token, or if nothing fits between the special tokens.
    """
    padding = tokenizer.pad_token_id
    if not isinstance(padding, int):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no padding token: name its pad_token in tokenizer_config.json"
        )
    before, after = _around(tokenizer)
    body = length - len(before) - len(after)
    if body < 1:
        raise ValueError(
            f"{length} tokens a sequence leave no place for text between {len(before) + len(after)} special tokens: "
            "lengthen the sequences"
        )
    for text in documents(origin, tokenizer, paragraphs=True):
        ids = _ids(tokenizer, text)
        for start in range(0, len(ids), body):
            row = np.concatenate([before, ids[start : start + body], after])
            yield np.pad(row, (0, length - len(row)), constant_values=padding)


def _sequences(
    origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, length: int, packing: Packing
) -> Iterator[np.ndarray]:
    return (_windows if packing == "windows" else document_rows)(origin, tokenizer, length)


def _part_of(part: Part, sequences: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    for index, sequence in enumerate(sequences):
        held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if part == "all" or held_out == (part == "validation"):
            yield sequence


def _windows(origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[np.ndarray]:
    rest = np.empty(0, dtype=np.int64)
    for text in documents(origin, tokenizer):
        if not text:
            continue
        rest = np.concatenate([rest, _ids(tokenizer, text + origin.separator)])
        whole = len(rest) // length * length
        yield from rest[:whole].reshape(-1, length)
        rest = rest[whole:]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:  # -> (tokens,) int64
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """Returns the special tokens that the tokenizer puts before and after a text."""
    text = "text"
    bare, whole = _ids(tokenizer, text), np.asarray(tokenizer(text)["input_ids"], dtype=np.int64)
    for start in range(len(whole) - len(bare) + 1):
        if len(bare) and np.array_equal(whole[start : start + len(bare)], bare):
            return whole[:start], whole[start + len(bare) :]
    raise ValueError(f"the tokenizer {tokenizer.name_or_path} changes a text where it adds special tokens to it")


def _bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    start = tokenizer.bos_token_id
    return start if isinstance(start, int) else None
