"""The stage: what it publishes of one text, of a mix, and of documents."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from storage.grid import load_tokens
from tasks.caching import Work
from tasks.calibrate import MIX, calibrate, calibrate_test
from tasks.models import ModelSource
from tasks.text import TextOrigin, find_text
from tasks.windows import draw

LENGTH = 9


@pytest.fixture
def texts(tmp_path: Path) -> list[TextOrigin]:
    """Returns three texts, each of one letter and numbers."""
    paths = [tmp_path / f"{letter}.txt" for letter in "abc"]
    for path in paths:
        path.write_text("".join(f"{path.stem}{number:04}" for number in range(200)))
    return [find_text(path=path) for path in paths]


def published(work: Work, source: ModelSource, **arguments: Any) -> np.ndarray:
    settings = {"length": LENGTH, "part": "all", "seed": 0, "tokenizer": source.tokenizer}
    calibrate.function(work, **(settings | arguments))
    return load_tokens(work.output)


def letters(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    return [next(letter for letter in "abc" if letter in tokenizer.decode(row)) for row in ids]


def test_one_text_is_drawn_from_and_nothing_else_is_written(
    work: Work, source: ModelSource, tokenizer: PreTrainedTokenizerBase, texts: list[TextOrigin]
) -> None:
    ids = published(work, source, text=texts[0], take=20, pool=50)
    expected = draw(texts[0], tokenizer, length=LENGTH, take=20, pool=50, part="all", seed=0)
    assert np.array_equal(ids, expected)
    assert [path.name for path in work.output.iterdir()] == ["tokens"]


def test_a_mix_holds_what_each_text_alone_gives_shuffled_and_says_how_much(
    work: Work, source: ModelSource, tokenizer: PreTrainedTokenizerBase, texts: list[TextOrigin]
) -> None:
    counts, pools = [12, 0, 5], [48, 0, 20]
    ids = published(work, source, text=texts, take=counts, pool=pools, part="calibration", seed=4)
    alone = [
        draw(text, tokenizer, length=LENGTH, take=count, pool=pool, part="calibration", seed=4)
        for text, count, pool in zip(texts, counts, pools, strict=True)
        if count
    ]
    assert sorted(map(tuple, ids)) == sorted(map(tuple, np.concatenate(alone)))
    order = letters(tokenizer, ids)
    assert [order.count(letter) for letter in "abc"] == counts
    assert order != sorted(order)
    assert json.loads((work.output / MIX).read_text()) == [
        {"text": text.digest, "sequences": count} for text, count in zip(texts, counts, strict=True)
    ]


def test_a_text_of_a_mix_that_is_too_short_is_named(work: Work, source: ModelSource, texts: list[TextOrigin]) -> None:
    with pytest.raises(ValueError, match=r"b\.txt gives 111 sequences of 9 tokens, 150 are asked for"):
        published(work, source, text=texts[:2], take=[10, 150], pool=[40, 600])


def test_the_key_tells_every_text_and_the_order_apart(source: ModelSource, texts: list[TextOrigin]) -> None:
    def key(text: Any, **settings: Any) -> str:
        return calibrate.key({"text": text, "tokenizer": source.tokenizer}, settings)

    keys = [key(texts[0]), key(texts[:1]), key(texts[:2]), key(texts[1::-1]), key(texts[:2], packing="documents")]
    assert len(set(keys)) == len(keys)


def test_the_test_text_in_windows_by_default(
    work: Work, source: ModelSource, tokenizer: PreTrainedTokenizerBase, texts: list[TextOrigin]
) -> None:
    calibrate_test.function(
        work, text=texts[0], tokenizer=source.tokenizer, length=LENGTH, max_tokens=None, bos="first"
    )
    ids = load_tokens(work.output)
    assert ids.shape == (1001 // LENGTH, LENGTH)
    assert ids[0, 0] == tokenizer.bos_token_id
    with pytest.raises(ValueError, match="has no padding token"):
        calibrate_test.function(
            work, text=texts[0], tokenizer=source.tokenizer, length=LENGTH, max_tokens=None, packing="documents"
        )
