"""Labelled texts as padded rows: against the tokenizer itself, and what cannot be made of a source."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from storage.tensors import load_tensors
from tasks.artifacts import read_json
from tasks.caching import Work
from tasks.images import IMAGES, read_classes
from tasks.labelled import calibrate_labelled
from tasks.models import TokenizerSource
from tasks.text import TextOrigin, find_text
from tests.flows.kinds import word_piece

LENGTH = 7
Write = Callable[[list[dict[str, Any]]], TextOrigin]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a maker of sources with the given records."""

    def make(records: list[dict[str, Any]]) -> TextOrigin:
        path = tmp_path / "labelled.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return find_text(path=path, label_field="kind")

    return make


@pytest.fixture
def tokenizer(tmp_path: Path) -> TokenizerSource:
    folder = tmp_path / "tokenizer"
    word_piece().save_pretrained(folder)
    return TokenizerSource(folder=str(folder), digest="0")


def test_rows_hold_the_text_between_special_tokens_and_padding(
    work: Work, write: Write, tokenizer: TokenizerSource
) -> None:
    records = [
        {"text": "red green", "kind": "colours"},
        {"text": "alpha " * 20, "kind": "greek"},  # cut, with its last special token
        {"text": "", "kind": "colours"},
        {"text": "blue nonsense", "kind": "colours"},
    ]
    calibrate_labelled.function(work, text=write(records), tokenizer=tokenizer, length=LENGTH)
    found = load_tensors(work.output)
    pad, unknown, start, end = range(4)
    ids = word_piece().convert_tokens_to_ids
    red, green, blue, alpha = ids(["red", "green", "blue", "alpha"])
    expected = [
        [start, red, green, end, pad, pad, pad],
        [start, *[alpha] * (LENGTH - 2), end],
        [start, end, *[pad] * 5],
        [start, blue, unknown, end, pad, pad, pad],
    ]
    assert found["tokens"].tolist() == expected
    assert found["tokens"].dtype == found["labels"].dtype == torch.int64
    assert found["labels"].tolist() == [0, 1, 0, 0]  # by the names in their order
    assert read_classes(work.output) == ["colours", "greek"]
    assert read_json(work.output / IMAGES)["counts"] == [4]


def test_numbers_are_names_too(work: Work, write: Write, tokenizer: TokenizerSource) -> None:
    labels = [10, 9, 10, 2]
    records = [{"text": "red", "kind": label} for label in labels]
    calibrate_labelled.function(work, text=write(records), tokenizer=tokenizer, length=LENGTH)
    classes = read_classes(work.output)
    assert classes is not None
    assert [classes[label] for label in load_tensors(work.output)["labels"]] == [str(label) for label in labels]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "holds no labelled text: add some"),
        ([{"text": "red", "kind": 1}, {"text": "green"}], "line 2: there is no label in field 'kind'"),
        ([{"text": "red", "kind": 0.5}], "line 1: there is no label in field 'kind'"),
        ([{"kind": 1}], "line 1: there is no text in field 'text'"),
    ],
)
def test_records_that_are_not_whole(
    work: Work, write: Write, tokenizer: TokenizerSource, records: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        calibrate_labelled.function(work, text=write(records), tokenizer=tokenizer, length=LENGTH)


def test_plain_text_has_no_labels(work: Work, tmp_path: Path, tokenizer: TokenizerSource) -> None:
    (tmp_path / "plain.txt").write_text("red")
    text = find_text(path=tmp_path / "plain.txt", label_field="kind")
    with pytest.raises(ValueError, match=r"plain\.txt is plain text and has no labels: give .jsonl or .parquet files"):
        calibrate_labelled.function(work, text=text, tokenizer=tokenizer, length=LENGTH)


def test_a_tokenizer_without_padding(work: Work, write: Write, tmp_path: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=word_piece().backend_tokenizer, unk_token="[UNK]")
    bare.save_pretrained(tmp_path / "bare")
    source = TokenizerSource(folder=str(tmp_path / "bare"), digest="0")
    with pytest.raises(ValueError, match="has no padding token: name its pad_token"):
        calibrate_labelled.function(work, text=write([{"text": "red", "kind": 1}]), tokenizer=source, length=LENGTH)
