"""Conversations read from files and hub datasets, and written out by a tokenizer's chat template."""

import copy
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from tasks.chat import rendered
from tasks.text import TextOrigin, documents, find_text, text_bytes
from tasks.windows import draw, joined_windows

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
<{{ message.role }}>{{ message.content }}{% if message.name is defined %} ({{ message.name }}){% endif %}
</{{ message.role }}>
{% endfor %}"""
CONVERSATIONS = [
    [
        {"role": "system", "content": f"be number {index}"},
        {"role": "user", "content": "why " * (index + 1), "name": "ada"},
        {"role": "assistant", "content": "because"},
    ][index % 2 :]
    for index in range(9)
]


@pytest.fixture(scope="session")
def chatting(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = TEMPLATE
    return chatting


def by_hand(bos: str) -> list[str]:
    def message(value: dict[str, str]) -> str:
        name = f" ({value['name']})" if "name" in value else ""
        return f"<{value['role']}>{value['content']}{name}</{value['role']}>\n"

    return [bos + "".join(map(message, conversation)) for conversation in CONVERSATIONS]


def as_jsonl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TextOrigin:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "messages": value}) + "\n" for value in CONVERSATIONS))
    return find_text(path=path, format="chat", field="messages", separator="")


def as_parquet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TextOrigin:
    path = folder / "chat.parquet"  # where a column of structures holds None for every name that is not given
    pyarrow.parquet.write_table(pyarrow.table({"messages": CONVERSATIONS}), path, row_group_size=4)
    return find_text(path=path, format="chat", field="messages", separator="")


def as_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TextOrigin:
    (folder / "README.md").write_text("no conversation")
    return find_text(
        path=Path(as_jsonl(folder, monkeypatch).path or "").parent, format="chat", field="messages", separator=""
    )


def as_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TextOrigin:
    import datasets

    def load(*names: Any, split: str, revision: str, streaming: bool) -> Any:
        assert names == ("some/chat", None)
        assert (split, revision, streaming) == ("train", "0" * 40, True)
        return datasets.Dataset.from_list([{"messages": value} for value in CONVERSATIONS]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    return find_text(dataset="some/chat", revision="0" * 40, format="chat", field="messages", separator="")


@pytest.mark.parametrize("make", [as_jsonl, as_parquet, as_folder, as_hub])
def test_every_source_of_conversations_gives_the_same_text(
    make: Callable[[Path, pytest.MonkeyPatch], TextOrigin],
    tmp_path: Path,
    chatting: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    origin = make(tmp_path, monkeypatch)
    expected = by_hand(str(chatting.bos_token))
    assert list(documents(origin, chatting)) == expected
    ids = [token for text in expected for token in chatting(text, add_special_tokens=False)["input_ids"]]
    count = len(ids) // 20
    windows = draw(origin, chatting, length=20, take=count, pool=count, part="all", seed=0)
    assert sorted(map(tuple, windows)) == sorted(map(tuple, np.array(ids[: 20 * count]).reshape(-1, 20)))
    assert ids.count(chatting.bos_token_id) == len(CONVERSATIONS)  # the template's own, and no other


def test_a_template_that_begins_the_text_is_not_begun_again(
    tmp_path: Path, chatting: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, start = as_jsonl(tmp_path, monkeypatch), chatting.bos_token_id
    ids = chatting("".join(by_hand(str(chatting.bos_token))), add_special_tokens=False)["input_ids"]
    assert ids[0] == start
    joined = {
        bos: joined_windows(origin, chatting, length=15, max_tokens=None, bos=bos)
        for bos in ("none", "first", "every_window")
    }
    assert joined["none"].ravel().tolist() == ids[: joined["none"].size]
    assert np.array_equal(joined["first"], joined["none"])
    assert joined["every_window"][:2].tolist() == [[start, *ids[1:15]], [start, *ids[15:29]]]


def test_the_text_does_not_depend_on_the_day(chatting: PreTrainedTokenizerBase) -> None:
    dated = copy.deepcopy(chatting)
    dated.chat_template = "\n  {% if true %}{{ strftime_now('%d %b %Y, %A') }}{% endif %}\n{{ messages[0].content }}"
    messages = [{"role": "user", "content": "hello"}]
    fixed = rendered(messages, dated, "here")
    now = dated.apply_chat_template(messages, tokenize=False)
    today = datetime.now().strftime("%d %b %Y, %A")
    assert "26 Jul 2024, Friday" in fixed
    assert fixed == now.replace(today, "26 Jul 2024, Friday")  # white space at the template's beginning included


def test_no_template_and_one_that_refuses(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = as_jsonl(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"chat\.jsonl, line 1: the tokenizer .* has no chat template: add its"):
        list(documents(origin, tokenizer))
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{% if messages[0].role != 'system' %}{{ raise_exception('No\nsystem!') }}{% endif %}fine"
    read = documents(origin, strict)
    assert next(read) == "fine"
    with pytest.raises(ValueError, match=r"chat\.jsonl, line 2: the chat template refuses .* \(No system!\): mend or"):
        next(read)
    strict.chat_template = "{% for %}"
    with pytest.raises(ValueError, match=r"line 1: the chat template refuses"):
        next(documents(origin, strict))


NOT_MESSAGES = [
    {"text": "no such field"},
    {"messages": "words"},
    {"messages": []},
    {"messages": ["words"]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"from": "human", "value": "words"}]},
    {"messages": [{"role": "user", "content": ["words"]}]},
]


@pytest.mark.parametrize("record", NOT_MESSAGES, ids=str)
def test_what_is_no_conversation_is_named_with_its_place(
    record: dict[str, Any], tmp_path: Path, chatting: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATIONS[0]}) + "\n\n" + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3: there is no list of messages in field 'messages': for"):
        list(documents(find_text(path=path, format="chat", field="messages"), chatting))


def test_a_column_that_holds_no_conversations(tmp_path: Path, chatting: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "words.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": [CONVERSATIONS[0], None], "text": ["a", "b"]}), path)
    with pytest.raises(ValueError, match=r"words\.parquet, row 2: there is no list of messages in field 'messages'"):
        list(documents(find_text(path=path, format="chat", field="messages"), chatting))
    with pytest.raises(ValueError, match=r"words\.parquet, row 1: there is no list of messages in field 'text'"):
        list(documents(find_text(path=path, format="chat", field="text"), chatting))
    with pytest.raises(ValueError, match=r"words\.parquet has no column 'chat', only messages, text"):
        list(documents(find_text(path=path, format="chat", field="chat"), chatting))


def test_plain_text_holds_no_conversations(tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text("words")
    with pytest.raises(ValueError, match=r"plain\.txt: chat is read from files ending in \.jsonl, \.parquet"):
        find_text(path=path, format="chat")
    with pytest.raises(ValueError, match=r"holds no chat: expected files ending in \.jsonl, \.parquet"):
        find_text(path=tmp_path, format="chat")


def test_the_digest_covers_the_format_and_only_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = as_folder(tmp_path, monkeypatch)
    assert origin.current_digest() == origin.digest
    assert origin.facts()["format"] == "chat"
    path = tmp_path / "chat.jsonl"
    assert text_bytes(origin) == path.stat().st_size
    (tmp_path / "README.md").write_text("other")
    assert origin.current_digest() == origin.digest
    same = find_text(path=path, field="messages", separator="", format="chat")
    plain = find_text(path=path, field="messages", separator="")
    assert same.digest != plain.digest
    assert "format" not in plain.facts()
    with path.open("a") as file:
        file.write("\n")
    assert same.current_digest() != same.digest
