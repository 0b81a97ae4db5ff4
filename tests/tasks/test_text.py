import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from tasks.text import HELD_OUT_EVERY, TextOrigin, documents, find_text
from tasks.windows import draw as draw_from
from tasks.windows import joined_windows

DOCUMENTS = [f"document {index} says {'so ' * (3 * index + 1)}" for index in range(12)]
LENGTH = 17


def as_text(folder: Path) -> Path:
    path = folder / "all.txt"
    path.write_text("\n\n".join(DOCUMENTS))
    return path


def as_jsonl(folder: Path) -> Path:
    path = folder / "all.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(DOCUMENTS)))
    return path


def as_parquet(folder: Path) -> Path:
    path = folder / "all.parquet"
    table = pyarrow.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
    pyarrow.parquet.write_table(table, path, row_group_size=5)
    return path


def as_folder(folder: Path) -> Path:
    path = folder / "all"
    for index, text in enumerate(DOCUMENTS):
        file = path / f"part-{index // 4}" / f"{index:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (path / "picture.png").write_bytes(b"\x89PNG not text")
    return path


MAKERS = [as_text, as_jsonl, as_parquet, as_folder]


def draw(origin: TextOrigin, tokenizer: PreTrainedTokenizerBase, **changes: object) -> np.ndarray:
    arguments: dict[str, object] = {"length": LENGTH, "take": 9, "pool": 30, "part": "all", "seed": 0}
    return draw_from(origin, tokenizer, **(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", MAKERS)
def test_every_kind_of_file_gives_the_same_windows(
    make: Callable[[Path], Path], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    origin = find_text(path=make(tmp_path))
    assert "\n\n".join(documents(origin, tokenizer)) == "\n\n".join(DOCUMENTS)
    ids = tokenizer("\n\n".join(DOCUMENTS) + "\n\n", add_special_tokens=False)["input_ids"]
    whole = np.array(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)
    windows = draw(origin, tokenizer, take=len(whole), pool=len(whole))
    assert windows.shape == whole.shape
    assert sorted(map(tuple, windows)) == sorted(map(tuple, whole))
    joined = joined_windows(origin, tokenizer, length=LENGTH, max_tokens=None, bos="none")
    assert np.array_equal(joined, whole[: len(joined)])


def test_all_kinds_of_files_are_drawn_from_alike(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    drawn = [draw(find_text(path=make(tmp_path)), tokenizer) for make in MAKERS]
    for windows in drawn[1:]:
        assert np.array_equal(windows, drawn[0])


def test_the_draw_is_a_function_of_the_seed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    origin = find_text(path=as_text(tmp_path))
    first = draw(origin, tokenizer, seed=5)
    assert np.array_equal(first, draw(origin, tokenizer, seed=5))
    assert not np.array_equal(first, draw(origin, tokenizer, seed=6))
    assert np.array_equal(first[:4], draw(origin, tokenizer, seed=5, take=4))  # fewer are the first of more


def test_only_the_pool_is_drawn_from(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    origin = find_text(path=as_text(tmp_path))
    pool = set(map(tuple, draw(origin, tokenizer, take=10, pool=10)))
    for seed in range(5):
        assert set(map(tuple, draw(origin, tokenizer, take=4, pool=10, seed=seed))) < pool


def test_calibration_and_validation_are_disjoint_and_together_all(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(f"{number:05}" for number in range(700)))
    origin = find_text(path=path)
    count = (700 * 6 - 1 + 2) // LENGTH
    held_out = count // HELD_OUT_EVERY
    every = set(map(tuple, draw(origin, tokenizer, take=count, pool=count)))
    validation = set(map(tuple, draw(origin, tokenizer, take=held_out, pool=count, part="validation")))
    calibration = set(map(tuple, draw(origin, tokenizer, take=count - held_out, pool=count, part="calibration")))
    assert (len(every), len(validation), len(calibration)) == (count, held_out, count - held_out)
    assert validation | calibration == every
    assert not validation & calibration


@pytest.mark.parametrize("part", ["all", "calibration", "validation"])
def test_too_little_text_states_counts_and_remedy(
    part: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * (33 * LENGTH))
    count = {"all": 33, "calibration": 31, "validation": 2}[part]
    named = "" if part == "all" else part + " "
    said = rf"short\.txt gives {count} {named}sequences of {LENGTH} tokens, 50 are asked for: add text"
    with pytest.raises(ValueError, match=said):
        draw(find_text(path=path), tokenizer, take=50, pool=200, part=part)


def test_less_than_one_test_window_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word")
    with pytest.raises(ValueError, match=r"gives 4 tokens, less than one window of 17: add text"):
        joined_windows(find_text(path=path), tokenizer, length=LENGTH, max_tokens=None, bos="none")


def test_where_the_beginning_token_goes(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "letters.txt"
    path.write_text("abcdefghijklmnopqrstuvw")  # 23
    origin, bos = find_text(path=path), tokenizer.bos_token_id
    ids = tokenizer(path.read_text())["input_ids"]
    windows = {
        policy: joined_windows(origin, tokenizer, length=5, max_tokens=None, bos=policy).tolist()
        for policy in ("none", "first", "every_window")
    }
    assert windows["none"] == [ids[i : i + 5] for i in (0, 5, 10, 15)]
    assert windows["first"] == [[bos, *ids[:4]], *(ids[i : i + 5] for i in (4, 9, 14))]
    assert windows["every_window"] == [[bos, *ids[i : i + 4]] for i in (0, 4, 8, 12, 16)]
    few = joined_windows(origin, tokenizer, length=5, max_tokens=11, bos="none")
    assert few.tolist() == windows["none"][:2]


def test_a_wrong_field_names_what_there_is(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"all\.parquet has no column 'body', only id, text"):
        list(documents(find_text(path=as_parquet(tmp_path), field="body"), tokenizer))
    with pytest.raises(ValueError, match=r"all\.jsonl, line 1: there is no text in field 'body'"):
        list(documents(find_text(path=as_jsonl(tmp_path), field="body"), tokenizer))
    with pytest.raises(ValueError, match=r"all\.parquet: its column 'id' holds int64, not text"):
        list(documents(find_text(path=as_parquet(tmp_path), field="id"), tokenizer))
    with pytest.raises(ValueError, match=r"line 1: there is no text in field 'id'"):
        list(documents(find_text(path=as_jsonl(tmp_path), field="id"), tokenizer))


def test_a_broken_line_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": "cut sh\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 3: not a JSON object"):
        list(documents(find_text(path=path), tokenizer))


def test_a_row_without_text_is_an_empty_document(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "gaps.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abc", None, "", "defgh"]}), path)
    origin = find_text(path=path, separator="")
    assert list(documents(origin, tokenizer)) == ["abc", "", "", "defgh"]
    assert draw(origin, tokenizer, length=8, take=1).tolist() == [tokenizer("abcdefgh")["input_ids"]]


def test_paragraphs_of_plain_files_and_whole_records(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.txt").write_text("one\nline two\n\n\nnext\n \t\nlast\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "not\n\ncut"}))
    pieces = list(documents(find_text(path=tmp_path), tokenizer, paragraphs=True))
    assert pieces == ["one\nline two", "next", "last\n", "not\n\ncut"]


def test_a_text_that_is_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file or folder"):
        find_text(path=tmp_path / "none.txt")
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"files ending in \.jsonl, "):
        find_text(path=tmp_path / "picture.png")
    with pytest.raises(ValueError, match="holds no text"):
        find_text(path=tmp_path)


def test_the_digest_is_of_content_and_way_of_reading(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    digest = find_text(path=as_folder(here)).digest
    copy = as_folder(there)
    assert find_text(path=copy).digest == digest
    assert find_text(path=copy, separator="\n").digest != digest
    assert find_text(path=copy, field="body").digest == digest  # plain text has no fields
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a", "body": "b"}\n')
    assert find_text(path=lines, field="body").digest != find_text(path=lines).digest
    (copy / "part-0" / "00.txt").write_text("other")
    assert find_text(path=copy).digest != digest
    assert find_text(path=as_text(here)).digest == find_text(path=as_text(there)).digest


def test_the_home_folder_has_its_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (as_text(tmp_path), as_folder(tmp_path)):
        short = find_text(path=Path("~") / path.name)
        assert short.digest == find_text(path=path).digest
        assert "\n\n".join(documents(short, tokenizer)) == "\n\n".join(DOCUMENTS)
