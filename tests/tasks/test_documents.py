"""Documents for text encoders: one a row, with special tokens and padding, and cut where they are too long."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tasks.text import Part, find_text
from tasks.windows import all_documents, document_rows, draw

LENGTH = 12
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = ["alpha", "beta", "gamma", "delta", "##s"]


def word_piece(template: str = "[CLS] $A [SEP]", **special: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer like BERT's of a few words, with special tokens as in ``template``."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)


@pytest.fixture(scope="session")
def encoder() -> PreTrainedTokenizerFast:
    return word_piece(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


def write_documents(path: Path, lengths: list[int]) -> list[str]:
    words = random.Random(0)
    texts = [" ".join(words.choice(["alpha", "betas", "nonsense"]) for _ in range(count)) for count in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), length=st.integers(3, 14))
def test_rows_are_those_of_the_tokenizer_itself(
    lengths: list[int], length: int, encoder: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("documents") / "all.jsonl"
    expected = [
        row
        for text in write_documents(path, lengths)
        if text
        for row in encoder(
            text, truncation=True, max_length=length, padding="max_length", return_overflowing_tokens=True
        )["input_ids"]
    ]
    rows = [row.tolist() for row in document_rows(find_text(path=path), encoder, length)]
    assert rows == expected


def test_every_piece_of_a_long_document_has_the_special_tokens(
    encoder: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("alpha " * 23 + "\n \n" + "beta\ngamma\n\n\n")
    rows = [encoder.decode(row) for row in document_rows(find_text(path=tmp_path), encoder, LENGTH)]
    full, last = ["[CLS]", *["alpha"] * 10, "[SEP]"], ["[CLS]", *["alpha"] * 3, "[SEP]", *["[PAD]"] * 7]
    paragraph = ["[CLS]", "beta", "gamma", "[SEP]", *["[PAD]"] * 8]
    assert [row.split() for row in rows] == [full, full, last, paragraph]


def test_only_before_and_only_after_and_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha beta")
    for template, words in (
        ("[CLS] $A", ["[CLS]", "alpha", "beta"]),
        ("$A [SEP]", ["alpha", "beta", "[SEP]"]),
        ("$A", ["alpha", "beta"]),
        ("[CLS] [CLS] $A [SEP]", ["[CLS]", "[CLS]", "alpha", "beta", "[SEP]"]),
    ):
        tokenizer = word_piece(template, pad_token="[PAD]")
        (row,) = document_rows(find_text(path=tmp_path), tokenizer, 6)
        assert tokenizer.decode(row).split() == words + ["[PAD]"] * (6 - len(words))


def test_documents_are_drawn_as_windows_are(encoder: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"text": "alpha " * n + "beta " * (9 - n)}) + "\n" for n in range(10)) * 5)
    origin = find_text(path=path)
    every = np.stack(list(document_rows(origin, encoder, LENGTH)))

    def drawn(take: int, part: Part, seed: int = 0) -> np.ndarray:
        return draw(origin, encoder, length=LENGTH, take=take, pool=99, part=part, seed=seed, packing="documents")

    assert np.array_equal(drawn(50, "all"), every[np.random.default_rng(0).permutation(50)])
    assert sorted(map(tuple, drawn(3, "validation"))) == sorted(map(tuple, every[[15, 31, 47]]))
    assert not np.array_equal(drawn(9, "all"), drawn(9, "all", seed=1))
    with pytest.raises(ValueError, match=r"all\.jsonl gives 3 validation sequences of 12 tokens, 4 are asked for: add"):
        drawn(4, "validation")


def test_the_test_text_is_every_document_up_to_a_number_of_tokens(
    encoder: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"text": "alpha " * count}) + "\n" for count in (4, 0, 2, 15)))
    origin = find_text(path=path)
    every = np.stack(list(document_rows(origin, encoder, LENGTH)))
    assert len(every) == 4  # of 6, 4, 12 and 7 tokens with the special ones
    for limit, rows in ((None, 4), (29, 4), (28, 3), (22, 3), (21, 2), (6, 1)):
        assert np.array_equal(all_documents(origin, encoder, length=LENGTH, max_tokens=limit), every[:rows])
    with pytest.raises(ValueError, match=r"all\.jsonl gives no document of at most 5 tokens: add text or raise"):
        all_documents(origin, encoder, length=LENGTH, max_tokens=5)
    path.write_text('{"text": "  "}\n')
    with pytest.raises(ValueError, match=r"all\.jsonl gives no document: add text"):
        all_documents(find_text(path=path), encoder, length=LENGTH, max_tokens=None)


def test_a_tokenizer_that_cannot_pad_and_a_length_without_place(
    encoder: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("alpha")
    origin = find_text(path=tmp_path)
    with pytest.raises(ValueError, match=r"has no padding token: name its pad_token in tokenizer_config\.json"):
        list(document_rows(origin, tokenizer, LENGTH))
    with pytest.raises(ValueError, match=r"2 tokens a sequence leave no place for text between 2 special tokens: len"):
        list(document_rows(origin, encoder, 2))
